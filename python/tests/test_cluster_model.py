"""The model of a job on a cluster whose checkpoints are in an object store. There is no cluster: a script plays kubectl, and a
folder the bucket. What runs in the pod is the package's own psjobs-worker."""

import json
import os
import pathlib
import sys
from typing import Any

import psjobs
import pytest
import torch

# Answers as kubectl does, and notes what it was asked; the file `damage`, if it is there, says what comes of the bytes `sent`.
KUBECTL = f"""#!{sys.executable}
import json, pathlib, subprocess, sys
here = pathlib.Path(__file__).parent
words = [word for word in sys.argv[1:] if not word.startswith("--namespace")]
with open(here / "asked", "a") as asked:
    asked.write(json.dumps(words) + "\\n")
if words[:2] == ["get", "parameterserverjobs.psjobs.dev"]:
    print((here / "job.json").read_text())
elif words[0] == "create":
    (here / "pod.json").write_text(sys.stdin.read())
elif words[0] == "exec":
    program, *rest = words[words.index("--") + 1:]
    assert program == "psjobs-worker", words
    rest = [word.replace("s3://bucket", str(here / "bucket")) for word in rest]
    worker = [sys.executable, "-c", "from psjobs.__main__ import worker; worker()", *rest]
    done = subprocess.run(worker, capture_output=True)
    sent = done.stdout
    if (here / "damage").exists():
        sent = eval((here / "damage").read_text())
    sys.stdout.buffer.write(sent)
    sys.stderr.buffer.write(done.stderr)
    sys.exit(done.returncode)
"""

JOB: dict[str, Any] = {
    "apiVersion": "psjobs.dev/v1alpha1",
    "kind": "ParameterServerJob",
    "metadata": {"name": "circle", "namespace": "team", "uid": "u1"},
    "spec": {
        "trainer": {"template": {"spec": {"containers": [{"name": "trainer", "image": "registry/psjobs-torch:1"}]}}},
        "checkpoint": {"objectStore": {"url": "s3://bucket/jobs", "secret": "store-keys"}},
    },
    "status": {"model": {"path": "s3://bucket/jobs/circle/model.safetensors"}},
}


@pytest.fixture
def here(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The folder of the program `kubectl`, with a job and its model."""
    program = tmp_path / "kubectl"
    program.write_text(KUBECTL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "job.json").write_text(json.dumps(JOB))
    return tmp_path


def asked(here: pathlib.Path) -> list[list[str]]:
    return [json.loads(line) for line in (here / "asked").read_text().splitlines()]


def test_a_model_in_an_object_store_is_read_by_a_pod_with_the_servers_credentials(here: pathlib.Path) -> None:
    weights = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.tensor([1.5])}
    psjobs.safetensors.write(here / "bucket/jobs/circle/model.safetensors", weights)
    model = psjobs.ClusterRun("circle", "team").model()
    assert model.keys() == weights.keys()
    assert all(torch.equal(model[name], value) for name, value in weights.items())
    pod = json.loads((here / "pod.json").read_text())
    container = pod["spec"]["containers"][0]
    assert container["image"] == "registry/psjobs-worker:1", "the one beside the trainers'"
    assert container["envFrom"] == [{"secretRef": {"name": "store-keys"}}]
    assert pod["metadata"]["ownerReferences"][0]["uid"] == "u1"
    assert asked(here)[-1][:3] == ["delete", "pod", pod["metadata"]["name"]]


@pytest.mark.parametrize("damage", ["sent[:-20]", "sent[:-1]", "b''", "sent[:40] + b'?' + sent[41:]"])
def test_a_model_that_does_not_come_as_it_was_sent_is_an_error(here: pathlib.Path, damage: str) -> None:
    psjobs.safetensors.write(here / "bucket/jobs/circle/model.safetensors", {"weight": torch.zeros(100)})
    (here / "damage").write_text(damage)
    with pytest.raises(psjobs.Error, match="only in part, or wrong.*try again"):
        psjobs.ClusterRun("circle", "team").model()
    assert asked(here)[-1][0] == "delete", "the pod goes in any case"


def test_an_error_of_the_store_is_that_of_the_model(here: pathlib.Path) -> None:
    with pytest.raises(psjobs.Error, match="cannot read .*model.safetensors: No such file"):
        psjobs.ClusterRun("circle", "team").model()
    assert asked(here)[-1][0] == "delete"
