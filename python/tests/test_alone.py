"""A script without a job."""

import json
import pathlib
import subprocess
import sys

import torch
from conftest import DEADLINE, PRELUDE, Record, environment


def run(script: str, folder: pathlib.Path, **more: str) -> "subprocess.CompletedProcess[str]":
    file = folder / "script.py"
    file.write_text(PRELUDE + script)
    return subprocess.run([sys.executable, file], env=environment(**more), capture_output=True, text=True, timeout=DEADLINE)


def test_importing_the_package_does_not_import_torch(
    tmp_path: pathlib.Path, record_property: Record
) -> None:
    file = tmp_path / "script.py"
    file.write_text(
        "import time\nt = time.monotonic()\nimport psjobs, sys\nprint('torch' in sys.modules, time.monotonic() - t)\n"
    )
    said = subprocess.run([sys.executable, file], env=environment(), capture_output=True, text=True, check=True)
    imported, seconds = said.stdout.split()
    record_property("import psjobs", f"{float(seconds) * 1e3:.0f} ms")
    assert imported == "False"


TRAIN = """
job = psjobs.join()
model, opt = job.attach(net())
assert job.alone and (job.trainer, job.trainers) == (0, 1)
for x, y in job.batches(data, 8, epochs=2):
    loss(model(x), y).backward()
    opt.step()
print(type(opt).__module__, type(opt).__name__, job.step)
save(model)
"""


def test_alone_a_script_trains_with_torchs_own_optimizer_and_says_so_in_a_sentence(tmp_path: pathlib.Path) -> None:
    training = {"optimizer": {"type": "Adam", "learningRate": 0.01}, "schedule": {"warmupSteps": 4}}
    said = run(TRAIN, tmp_path, SAVE=str(tmp_path / "a.pt"), PSJOB_TRAINING=json.dumps(training))
    assert said.returncode == 0, said.stderr
    assert said.stdout.split() == ["torch.optim.adam", "Adam", "24"]
    assert said.stderr.count("\n") == 1 and "alone" in said.stderr, said.stderr


def test_alone_the_default_rule_is_the_jobs(tmp_path: pathlib.Path) -> None:
    said = run(TRAIN, tmp_path, SAVE=str(tmp_path / "a.pt"))
    assert said.stdout.split() == ["torch.optim.sgd", "SGD", "24"], said.stderr
    assert len(torch.load(tmp_path / "a.pt")) == 4


OWN = TRAIN.replace("job.attach(net())", "job.attach(first := net(), torch.optim.RMSprop(first.parameters(), lr=0.001))")


def test_alone_a_script_keeps_its_own_optimizer(tmp_path: pathlib.Path) -> None:
    said = run(OWN, tmp_path, SAVE=str(tmp_path / "a.pt"))
    assert said.stdout.split() == ["torch.optim.rmsprop", "RMSprop", "24"], said.stderr
