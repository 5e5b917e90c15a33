"""Jobs on this machine: `run` starts a script as each trainer, as `psjobs run -- python3 train.py` does."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from psjobs import ending, notebook
from psjobs._native import Error, InputError

if TYPE_CHECKING:
    import torch

POLL = 0.2
"""Seconds between two looks at log files that are followed."""


class JobFailed(Error):
    """A job failed; the text says why, with the last lines of the process that failed first."""


def run(
    script: str | os.PathLike[str] | Sequence[str],
    args: Sequence[str] = (),
    *,
    trainers: int = 2,
    servers: int = 1,
    gpus: int | None = None,
    training: Mapping[str, Any] | None = None,
    spec: Mapping[str, Any] | None = None,
    folder: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    quiet: bool = False,
    wait: bool = True,
) -> Run:
    """Runs a script as each of `trainers` trainers on this machine, with `servers` servers and `gpus` GPUs for each trainer:
    by default one if the machine has any. Trainers share the GPUs of a machine that has fewer.

    `script` is a Python file, which this interpreter runs with `args`, or the words of any command. `training` is the
    job's `spec.training`, for example `{"optimizer": {"type": "Adam", "learningRate": 1e-3}}`; `spec` other fields of the
    spec by their dotted names, for example `{"ps.replicationFactor": 2}`. `folder` takes the logs, checkpoints and the
    model; without it a temporary folder does, which is removed with the returned object. `env` is added to the variables
    of this process. Progress is shown on standard error, in a notebook as a table, unless `quiet`.

    Waits for the end of the job, unless `wait` is false: then the methods of the returned object do.

    Raises JobFailed if the job fails, InputError if the script or a field is wrong.
    """
    if not isinstance(script, str | os.PathLike):
        command = [*script, *args]
    elif pathlib.Path(script).is_file():
        command = [sys.executable, os.fspath(script), *args]
    else:
        raise InputError(f"there is no script {os.fspath(script)} in {pathlib.Path.cwd()}; name it by its path")
    fields = [*(spec or {}).items(), *((f"training.{name}", value) for name, value in (training or {}).items())]
    if not any(name == "checkpoint" or name.startswith("checkpoint.") for name, _ in fields):
        # The model is exported with checkpoints.
        fields.append(("checkpoint", {"volumeClaim": {"size": "1Gi"}}))
    if gpus is not None:
        fields.append(("trainer.gpus", gpus))
    started = Run(command, trainers, servers, fields, folder, env or {}, quiet)
    if wait:
        started.wait()
    return started


class Run:
    """A job on this machine. `run` makes it."""

    def __init__(
        self,
        command: Sequence[str],
        trainers: int,
        servers: int,
        fields: Sequence[tuple[str, Any]],
        folder: str | os.PathLike[str] | None,
        env: Mapping[str, str],
        quiet: bool,
    ) -> None:
        # Removed when this object is gone.
        self._temporary = tempfile.TemporaryDirectory(prefix="psjobs-") if folder is None else None
        self.folder = pathlib.Path(self._temporary.name if self._temporary else folder or ".").absolute()
        """Takes logs, checkpoints, the status and the model."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._table = None if quiet else notebook.table()
        flags = ["--json", "--log-dir", str(self.folder), "--status-file", str(self.folder / "status.json")]
        if not any("objectStore" in name or name == "checkpoint" and "objectStore" in (value or {}) for name, value in fields):
            # The folder of the flag would count more than the object store.
            flags += ["--checkpoint-dir", str(self.folder / "checkpoints")]
        flags += ["--trainers", str(trainers), "--servers", str(servers)]
        for name, value in fields:
            flags += ["--set", f"{name}={json.dumps(value)}"]
        if quiet or self._table is not None:
            flags.append("--quiet")
        (self.folder / "status.json").unlink(missing_ok=True)
        psjobs = [sys.executable, "-m", "psjobs", "run", *flags, "--", *command]
        self._lines: list[str] = []
        self._process = subprocess.Popen(
            psjobs,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read_errors, args=(quiet,), daemon=True)
        self._reader.start()
        self._out: str | None = None

    def _read_errors(self, quiet: bool) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line)
            if not quiet:
                sys.stderr.write(line)

    @property
    def status(self) -> dict[str, Any]:
        """State of the job: `state` is Running, Succeeded, Failed or Interrupted; while it runs there are `step`,
        `totalSteps` (0 if unknown), `examplesPerSecond`, `metrics` and `trainers`, at its end what `wait` returns."""
        if self._process.poll() is not None:
            return self._summary()
        try:
            found: dict[str, Any] = json.loads((self.folder / "status.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            found = {}
        return {"state": "Running", **found}

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Waits for the end of the job, at most `timeout` seconds, and returns its summary: `steps`, `accuracy`,
        `metrics`, `seconds` and more. Ctrl-C ends the job.

        Raises JobFailed if the job fails, InputError if the script or a field is wrong, TimeoutError.
        """
        try:
            if self._table is not None:
                self._table.show_until_over(lambda: self.status, self._process, timeout)
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the job goes on after {timeout} s; stop() ends it") from None
        except KeyboardInterrupt:
            self.stop()
            raise
        summary = self._summary()
        code = self._process.returncode
        if code != 0:
            said = "".join(self._lines).strip()
            raise InputError(said) if code == ending.WRONG_INPUT else JobFailed(said or f"psjobs ended with exit code {code}")
        return summary

    def stop(self) -> None:
        """Ends the job, as Ctrl-C does, and waits for the end of its processes."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        self._process.wait()

    def logs(self, role: str = "trainer", index: int = 0, follow: bool = False) -> Iterator[str]:
        """The lines that a process has written: `role` is "trainer" or "ps". With `follow` those to come, too, until the
        end of the job.

        Raises InputError if there is no such process.
        """
        file = self.folder / f"{role}-{index}.log"
        if not file.exists() and self._process.poll() is not None:
            raise InputError(f"there is no log of {role} {index}; there are {sorted(f.stem for f in self.folder.glob('*.log'))}")
        return self._lines_of(file, follow)

    def model(self) -> dict[str, torch.Tensor]:
        """The trained parameters by their names, for `model.load_state_dict(..., strict=False)`: buffers, which each
        trainer has for itself, are not among them.

        Raises Error if the job has not exported a model.
        """
        file = self._summary().get("model")
        if file is None:
            raise Error("the job has no model to read: it has not ended well, or its servers exported none")
        if "://" in file:
            raise Error(f"the model is in an object store, {file}; fetch it with the store's own program")
        from psjobs import safetensors

        return safetensors.read(file)

    def _lines_of(self, file: pathlib.Path, follow: bool) -> Iterator[str]:
        position, partial = 0, ""
        while True:
            over = self._process.poll() is not None
            if file.exists():
                with file.open("rb") as log:
                    log.seek(position)
                    data = log.read()
                position += len(data)
                *lines, partial = (partial + data.decode(errors="replace")).split("\n")
                yield from lines
            if over or not follow:
                break
            try:
                self._process.wait(POLL)
            except subprocess.TimeoutExpired:
                pass
        if partial:
            yield partial

    def _summary(self) -> dict[str, Any]:
        """What `psjobs run --json` prints at its end."""
        if self._process.poll() is None:
            return {}
        if self._out is None:
            assert self._process.stdout is not None
            self._out = self._process.stdout.read()
            self._reader.join()
        if not self._out.strip():
            return {"state": "Failed"}
        summary: dict[str, Any] = json.loads(self._out)
        return summary
