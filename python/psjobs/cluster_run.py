"""Jobs on a cluster: `submit` sends a script there and returns a `ClusterRun`, which follows the job.

Both ask kubectl, so cluster, user and namespace are those of the user's own configuration.
"""

from __future__ import annotations

import base64
import json
import os
import pathlib
import re
import secrets
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from psjobs import _native
from psjobs._native import Error, InputError
from psjobs.local_run import JobFailed

if TYPE_CHECKING:
    import torch

POLL = 1.0
"""Seconds between two looks at the job."""
AWAY = 120.0
"""Seconds for which the API server may be away while the end of a job is waited for."""
FOLDER = "/psjobs"
"""Where the script and its files lie in a trainer's container."""
MOST_BYTES = 1_000_000
"""Of script and files together: a ConfigMap holds 1 MiB."""
CHECKPOINTS = "/checkpoints"
KIND = "parameterserverjobs.psjobs.dev"


def submit(
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    trainers: int = 2,
    servers: int = 1,
    gpus: int = 0,
    image: str | None = None,
    files: Sequence[str | os.PathLike[str]] = (),
    name: str | None = None,
    namespace: str | None = None,
    context: str | None = None,
    training: Mapping[str, Any] | None = None,
    spec: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    resources: Mapping[str, Any] | None = None,
    wait: bool = False,
) -> ClusterRun:
    """Runs a script as each of `trainers` trainers on a cluster, with `servers` servers and `gpus` GPUs for each trainer.

    The script and `files`, at most 1 MB together, travel in a ConfigMap that is deleted with the job; data and large files
    belong into the image or on a volume. `image` has Python, torch and this package: by default `psjobs-torch` of this
    version. `name` is the job's, by default the script's with a random ending. `namespace` and `context` are kubectl's.
    `training` is the job's `spec.training`; `spec` other fields by their dotted names, as for `run`. `env` are variables
    of the trainers, `resources` their container's, for example `{"requests": {"cpu": "2", "memory": "4Gi"}}`.

    With `wait`, waits for the end of the job; else the methods of the returned object do.

    Raises InputError if a file, a name or a field is wrong, Error if kubectl or the cluster does not do what is asked,
    and with `wait` JobFailed if the job fails.
    """
    path = pathlib.Path(script)
    contents = _contents([path, *map(pathlib.Path, files)])
    name = name or f"{_label(path.stem)}-{secrets.token_hex(3)}"
    kubectl = Kubectl(context, namespace)
    manifest = job_manifest(
        name, path.name, args, trainers, servers, gpus, image or _native.IMAGE, training or {}, spec or {}, env or {}, resources
    )
    config: dict[str, Any] = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": config_name(name)}}
    config["binaryData"] = {file: base64.b64encode(data).decode() for file, data in contents.items()}
    kubectl("create", "-f", "-", given=json.dumps(config))
    try:
        created = json.loads(kubectl("create", "-o", "json", "-f", "-", given=json.dumps(manifest)))
    except Error:
        kubectl("delete", "configmap", config_name(name), "--ignore-not-found")
        raise
    meta = created["metadata"]
    owner = {"apiVersion": manifest["apiVersion"], "kind": manifest["kind"], "name": name, "uid": meta["uid"]}
    patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
    kubectl("patch", "configmap", config_name(name), "--type=merge", "-p", patch)
    started = ClusterRun(name, meta["namespace"], context)
    sys.stderr.write(f"psjobs: submitted job {name} to namespace {started.namespace}\n")
    if wait:
        started.wait()
    return started


def config_name(job: str) -> str:
    """Name of the ConfigMap with the script of a job."""
    return f"{job}-script"


def job_manifest(
    name: str,
    script: str,
    args: Sequence[str],
    trainers: int,
    servers: int,
    gpus: int,
    image: str,
    training: Mapping[str, Any],
    spec: Mapping[str, Any],
    env: Mapping[str, str],
    resources: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The ParameterServerJob whose trainers run a script of the ConfigMap.

    Raises InputError if a field of `spec` is the trainers' template, which this makes, or no field.
    """
    container: dict[str, Any] = {
        "name": "trainer",
        "image": image,
        "command": ["python3", "-u", f"{FOLDER}/{script}", *args],
        "env": [{"name": variable, "value": value} for variable, value in env.items()],
        "volumeMounts": [{"name": "script", "mountPath": FOLDER, "readOnly": True}],
    }
    if resources is not None:
        container["resources"] = dict(resources)
    volume = {"name": "script", "configMap": {"name": config_name(name)}}
    whole: dict[str, Any] = {
        "training": dict(training),
        "ps": {"replicas": servers},
        "trainer": {
            "replicas": trainers,
            "gpus": gpus,
            "template": {"spec": {"containers": [container], "volumes": [volume]}},
        },
    }
    for field, value in spec.items():
        *path, last = field.split(".")
        inner = whole
        for part in path:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise InputError(f"spec.{field} does not exist: {part} has no fields")
        if field == "trainer" or field.startswith("trainer.template"):
            raise InputError("spec.trainer.template is made of image, env, resources and the script; apply a manifest of your own")
        inner[last] = value
    if "checkpoint" not in whole and dict(whole["ps"]).get("replicas", 1) == 1:
        # The model is exported with checkpoints. Several servers need a volume that is written from several nodes.
        whole["checkpoint"] = {"volumeClaim": {"size": "1Gi"}}
    return {"apiVersion": "psjobs.dev/v1alpha1", "kind": "ParameterServerJob", "metadata": {"name": name}, "spec": whole}


class Kubectl:
    """kubectl with the user's configuration, in one namespace."""

    def __init__(self, context: str | None, namespace: str | None) -> None:
        self._flags = [f"--context={context}"] if context else []
        self._flags += [f"--namespace={namespace}"] if namespace else []

    def command(self, *args: str) -> list[str]:
        """The words of a command."""
        return ["kubectl", *self._flags, *args]

    def __call__(self, *args: str, given: str | None = None) -> str:
        """What a command prints.

        Raises InputError if the API server refuses what it is given, Error if something else fails.
        """
        return self.read(*args, given=given).decode()

    def read(self, *args: str, given: str | None = None) -> bytes:
        """As a call, as bytes."""
        try:
            done = subprocess.run(self.command(*args), input=None if given is None else given.encode(), capture_output=True)
        except FileNotFoundError:
            raise Error("kubectl is not installed, or not on PATH; jobs on this machine need none: psjobs.run") from None
        if done.returncode == 0:
            return done.stdout
        said = done.stderr.decode(errors="replace").strip()
        wrong = re.search(r"is invalid|\(Invalid\)|\(BadRequest\)|AlreadyExists|error validating|Invalid value", said)
        if 'no matches for kind "ParameterServerJob"' in said:
            said += "; install psjobs in the cluster first, see the README"
        raise (InputError if wrong else Error)(said or f"kubectl {args[0]} ended with exit code {done.returncode}")


class ClusterRun:
    """A job on a cluster. `submit` makes it; `ClusterRun(name, namespace)` is one that was submitted before."""

    def __init__(self, name: str, namespace: str | None = None, context: str | None = None) -> None:
        self.name = name
        """Name of the job."""
        self._kubectl = Kubectl(context, namespace)
        self.namespace = namespace or self._resource()["metadata"]["namespace"]
        """Namespace of the job."""

    @property
    def status(self) -> dict[str, Any]:
        """State of the job: `state` is its phase; `step`, `totalSteps` (0 if unknown), `examplesPerSecond` and `metrics`
        where they are known, `warnings`, and `resource`, the whole status of the Kubernetes object."""
        found: dict[str, Any] = self._resource().get("status") or {}
        progress = found.get("progress") or {}
        stalled = [c["message"] for c in found.get("conditions") or [] if c["type"] == "Stalled" and c["status"] == "True"]
        return {
            "state": found.get("phase", "Pending"),
            "metrics": {metric["name"]: metric["value"] for metric in progress.get("metrics") or []},
            "warnings": stalled,
            "resource": found,
            **{name: progress[name] for name in ("step", "totalSteps", "examplesPerSecond") if name in progress},
        }

    def wait(self, timeout: float | None = None, quiet: bool = False) -> dict[str, Any]:
        """Waits for the end of the job, at most `timeout` seconds, and returns its last status. Shows progress on standard
        error unless `quiet`. Ctrl-C ends the wait, and not the job. The API server may be away for two minutes.

        Raises JobFailed if the job fails, TimeoutError, Error if the job is gone or may not be read.
        """
        end = None if timeout is None else time.monotonic() + timeout
        shown = ""
        answered = time.monotonic()
        while True:
            status = None
            try:
                status = self.status
                line = _line(self.name, status)
                answered = time.monotonic()
            except Error as error:
                if _is_an_answer(str(error)) or time.monotonic() - answered > AWAY:
                    raise
                line = f"{self.name}: cannot be read, and is tried again: {error}"
            if not quiet and line != shown:
                sys.stderr.write(f"{line}\n")
                shown = line
            if status is not None and status["state"] == "Succeeded":
                return status
            if status is not None and status["state"] == "Failed":
                raise JobFailed(_failure(self.name, status["resource"]))
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"job {self.name} goes on after {timeout} s; delete() ends it")
            time.sleep(POLL if end is None else min(POLL, max(end - time.monotonic(), 0.0)))

    def logs(self, role: str = "trainer", index: int = 0, follow: bool = False) -> Iterator[str]:
        """The lines that a pod has written: `role` is "trainer" or "ps". With `follow` those to come, too.

        Raises Error if there is no such pod, or it has not started.
        """
        command = self._kubectl.command("logs", f"{self.name}-{role}-{index}", *(["--follow"] if follow else []))
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stderr is not None
            try:
                for line in process.stdout:
                    yield line.removesuffix("\n")
            except GeneratorExit:
                process.kill()  # The caller reads no further; kubectl would wait for the next line.
                raise
            said = process.stderr.read().strip()
        if process.returncode != 0:
            raise Error(said or f"kubectl logs ended with exit code {process.returncode}")

    def model(self) -> dict[str, torch.Tensor]:
        """The trained parameters by their names, for `model.load_state_dict(..., strict=False)`.

        A pod of the job's own image reads them from the volume or the object store with the checkpoints; this machine needs no
        credentials of the store. Raises Error if the job has exported no model, or it cannot be read.
        """
        resource = self._resource()
        file = ((resource.get("status") or {}).get("model") or {}).get("path")
        if file is None:
            raise Error(f"job {self.name} has no model to read: it has not ended well, or keeps no checkpoints")
        checkpoint = resource["spec"]["checkpoint"]
        pod = f"{self.name}-read-{secrets.token_hex(3)}"
        if "objectStore" in checkpoint:
            manifest, program = _native.store_pod(json.dumps(resource), pod, self._server_image())
            data = _whole(self._print_in(pod, manifest, *program, "store", "read", file), file)
        else:
            claim = checkpoint.get("existingClaim") or f"{self.name}-checkpoints"
            data = self._print_in(pod, json.dumps(_reader(pod, claim, resource)), "cat", f"{CHECKPOINTS}/{file}")
        from psjobs import safetensors

        return safetensors.parse(data, file)

    def delete(self) -> None:
        """Deletes the job with its pods, its script, and its volume if the job has made it."""
        self._kubectl("delete", KIND, self.name)

    def _print_in(self, pod: str, manifest: str, *command: str) -> bytes:
        """What a command prints in a pod that is there for it alone."""
        kubectl = self._kubectl
        kubectl("create", "-f", "-", given=manifest)
        try:
            kubectl("wait", f"pod/{pod}", "--for=condition=Ready", "--timeout=120s")
            return kubectl.read("exec", pod, "--container=read", "--", *command)
        finally:
            kubectl("delete", "pod", pod, "--wait=false", "--ignore-not-found")

    def _server_image(self) -> str | None:
        """The image of the job's server 0, if its pod is there."""
        image = "jsonpath={.spec.containers[0].image}"
        try:
            return self._kubectl("get", "pod", f"{self.name}-ps-0", "--ignore-not-found", "-o", image).strip() or None
        except Error:
            return None  # The user may not look at pods; then it is guessed.

    def _resource(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._kubectl("get", KIND, self.name, "-o", "json"))
        return found


def _contents(paths: Sequence[pathlib.Path]) -> dict[str, bytes]:
    """The files by their names.

    Raises InputError if one is not there, two have one name, or they are too large.
    """
    contents: dict[str, bytes] = {}
    for path in paths:
        if not path.is_file():
            raise InputError(f"there is no file {path} in {pathlib.Path.cwd()}; name it by its path")
        if path.name in contents:
            raise InputError(f"two files are called {path.name}; all lie in one folder beside the script, so rename one")
        if not re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", path.name):
            raise InputError(f"{path.name} cannot be a key of a ConfigMap; use letters, digits, - . and _ in names of files")
        contents[path.name] = path.read_bytes()
    total = sum(map(len, contents.values()))
    if total > MOST_BYTES:
        raise InputError(f"the script and its files have {total:,} bytes, and {MOST_BYTES:,} travel; put data into the image")
    return contents


def _label(text: str) -> str:
    """A name for Kubernetes, at most 40 characters long."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-") or "job"


def _is_an_answer(said: str) -> bool:
    """Whether kubectl says what the API server answered, or what is wrong on this machine: a further try says the same."""
    final = r"\((NotFound|Forbidden|Unauthorized|BadRequest)\)|must be logged in|no matches for kind|kubectl is not installed"
    return re.search(final + r"|error: (context|unable to (read|load)|no configuration|loading config)", said) is not None


def _line(name: str, status: Mapping[str, Any]) -> str:
    parts = [f"{name}: {status['state']}"]
    if status.get("step"):
        total = f" of {status['totalSteps']:,}" if status.get("totalSteps") else ""
        parts.append(f"step {status['step']:,}{total}")
    parts += [f"{metric} {value:.4g}" for metric, value in sorted(status["metrics"].items())]
    return ", ".join([*parts, *status["warnings"]])


def _failure(name: str, status: Mapping[str, Any]) -> str:
    """Why a job has failed."""
    conditions = {condition["type"]: condition["message"] for condition in status.get("conditions") or []}
    cause = status.get("lastFailure") or {}
    text = [conditions.get("Failed") or f"job {name} has failed"]
    if cause.get("message"):
        text.append(f"{cause.get('pod', '')}: {cause['message']}")
    if cause.get("logTail"):
        text.append(cause["logTail"].rstrip())
    return "\n".join(text)


def _whole(sent: bytes, file: str) -> bytes:
    """The bytes that `psjobs-worker store read` has sent: between a line with their length and one with their CRC-32.

    Raises Error if they are not all there, or others.
    """
    length, _, rest = sent.partition(b"\n")
    data, checksum = rest[:-9], rest[-9:]
    if not length.isdigit() or len(data) != int(length) or checksum != b"%08x\n" % zlib.crc32(data):
        raise Error(f"{file} has come only in part, or wrong: {len(data):,} bytes; try again")
    return data


def _reader(pod: str, claim: str, resource: Mapping[str, Any]) -> dict[str, Any]:
    """A pod with the volume of a job's checkpoints, which ends by itself after ten minutes."""
    meta = resource["metadata"]
    image = resource["spec"]["trainer"]["template"]["spec"]["containers"][0]["image"]
    mount = {"name": "checkpoints", "mountPath": CHECKPOINTS, "readOnly": True}
    # What the strictest of Kubernetes' pod security standards asks for.
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": True}
    security["seccompProfile"] = {"type": "RuntimeDefault"}
    command = ["sleep", "600"]
    container = {"name": "read", "image": image, "command": command, "volumeMounts": [mount], "securityContext": security}
    volume = {"name": "checkpoints", "persistentVolumeClaim": {"claimName": claim}}
    owner = {"apiVersion": resource["apiVersion"], "kind": resource["kind"], "name": meta["name"], "uid": meta["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod, "ownerReferences": [owner]},
        "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [container], "volumes": [volume]},
    }
