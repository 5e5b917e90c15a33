"""Exchanges that the next gradient overlaps (`spec.training.consistency.overlap`)."""

import json
import pathlib
import signal
import subprocess
import sys
from typing import Any

import psjobs
import pytest
import torch
from conftest import DEADLINE, PRELUDE, Jobs, environment, free_port, program, succeed
from test_faults import CHECKPOINTS, KILL
from test_overlap import APART
from test_training import same

RATE = 0.125
SGD = {"type": "SGD", "learningRate": RATE}
FLAGS = ("--optimizer", "sgd", "--learning-rate", str(RATE))
TRAINING: dict[str, Any] = {"consistency": {"overlap": True}, "optimizer": SGD, "batch": {"base": 8}}

# Twelve steps an epoch.
TRAIN = """
job = psjobs.join()
model, opt = job.attach(net())
for x, y in job.batches(data, 8, epochs=2):
    loss(model(x), y).backward()
    opt.step()
save(model)
"""

# The same in one process: the parameters of an exchange are taken when the next gradient is there.
ALONE = """
job = psjobs.join()
model, _ = job.attach(net())
parameters = list(model.parameters())
servers = [p.detach().clone() for p in parameters]
for x, y in job.batches(data, 8, epochs=2):
    loss(model(x), y).backward()
    for p, value in zip(parameters, servers):
        gradient, p.grad = p.grad, None
        p.data = value.clone()
        value -= RATE * gradient
for p, value in zip(parameters, servers):
    p.data = value
save(model)
"""

# Each step takes RATE from every parameter.
COUNTED = """
job = psjobs.join()
model, opt = job.attach(net())
for x, y in job.batches(data, 8, epochs=EPOCHS):
    sum(p.sum() for p in model.parameters()).backward()
    BEFORE
    opt.step()
    AFTER
print("rewinds", job._rewinds)
save(model)
"""


def counted(epochs: int, before: str = "pass", after: str = "pass") -> str:
    return COUNTED.replace("EPOCHS", str(epochs)).replace("BEFORE", before).replace("AFTER", after)


def check_counted(model: dict[str, torch.Tensor], steps: int) -> None:
    """Raises AssertionError unless each step is in the model once."""
    torch.manual_seed(3)
    begun = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).state_dict()
    assert model.keys() == begun.keys()
    for name, tensor in model.items():
        assert torch.allclose(tensor, begun[name] - steps * RATE, atol=1e-3), (name, (begun[name] - tensor) / RATE)


@pytest.mark.parametrize("place", ["cpu", "apart"])
def test_gradients_are_computed_with_the_parameters_of_the_exchange_before(jobs: Jobs, place: str) -> None:
    job = jobs.start(*FLAGS, **TRAINING)
    succeed(job.trainer(0, (APART if place == "apart" else "") + TRAIN))
    assert job.server.wait(DEADLINE) == 0 and "done steps=24" in job.log.read_text()
    file = job.folder / "alone.py"
    file.write_text(PRELUDE + ALONE.replace("RATE", str(RATE)))
    variables = {"SAVE": str(job.folder / "alone.pt"), "PSJOB_TRAINING": json.dumps({"batch": {"base": 8}})}
    subprocess.run([sys.executable, file], env=environment(**variables), check=True, capture_output=True)
    assert same(job.folder / "model-0.pt", job.folder / "alone.pt")


def test_a_gradient_is_computed_while_the_server_stands_still(jobs: Jobs) -> None:
    script = """
import signal
server = int(os.environ["SERVER"])
job = psjobs.join()
model, opt = job.attach(net())
begun = [p.detach().clone() for p in model.parameters()]
for x, y in job.batches(data, 8):
    loss(model(x), y).backward()
    if job.step == 0:
        os.kill(server, signal.SIGSTOP)
    if job.step == 1:
        # The exchange of step 0 cannot have ended. The model is what it was, and can be read.
        assert all(torch.equal(p, value) for p, value in zip(model.parameters(), begun))
        job.report({"loss": 1.0})
        job.save(os.environ["SAVE"])
        os.kill(server, signal.SIGCONT)
    opt.step()
print("did", job.step)
"""
    job = jobs.start(*FLAGS, **TRAINING)
    (said,) = succeed(job.trainer(0, script, SERVER=str(job.server.pid)))
    assert "did 12" in said, said
    assert job.server.wait(DEADLINE) == 0


def test_each_gradient_counts_as_one_update_staler(jobs: Jobs) -> None:
    script = """
from http.client import HTTPConnection
job = psjobs.join()
model, opt = job.attach(net())
# Each call ends the exchange under way, so that the first gradient of each is not stale.
for _ in range(2):
    for x, y in job.batches(data, 8):
        loss(model(x), y).backward()
        opt.step()
server = HTTPConnection("localhost", int(os.environ["METRICS"]))
server.request("GET", "/metrics")
for line in server.getresponse().read().decode().splitlines():
    if line.startswith("psjobs_ps_staleness_"):
        print(line)
"""
    port = str(free_port())
    for overlap, stale in [(False, 0), (True, 22)]:
        job = jobs.start(*FLAGS, "--metrics-port", port, **{**TRAINING, "consistency": {"overlap": overlap}})
        (said,) = succeed(job.trainer(0, script, METRICS=port))
        assert f"psjobs_ps_staleness_sum {stale}\n" in said and "psjobs_ps_staleness_count 24\n" in said, said
        assert job.server.wait(DEADLINE) == 0


def test_a_trainer_that_is_asked_to_end_in_the_middle_leaves_no_step_out(jobs: Jobs) -> None:
    job = jobs.start(*FLAGS, **TRAINING)
    asked = job.trainer(0, "import signal\n" + counted(1, after="if job.step == 5: os.kill(os.getpid(), signal.SIGTERM)"))
    assert asked.wait(DEADLINE) == 128 + signal.SIGTERM
    succeed(job.trainer(0, counted(1), PSJOB_INCARNATION="1"))
    assert job.server.wait(DEADLINE) == 0 and "done steps=12" in job.log.read_text()
    check_counted(torch.load(job.folder / "model-0.pt"), 12)


STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from data
data_of = Stream()
"""
SAMPLER = """
def loaded():
    sampler = job.sampler(data, 8)
    for _ in range(10):
        yield from torch.utils.data.DataLoader(data, 8, sampler=sampler, num_workers=1)
"""


@pytest.mark.parametrize("source", ["batches", "stream", "sampler"])
def test_servers_that_go_back_take_the_exchange_under_way_along(tmp_path: pathlib.Path, source: str) -> None:
    kill = """if job.step == 20 and not done.exists():
        while not any((done.parent / "checkpoints").rglob("manifest.json")):
            time.sleep(0.01)
        done.touch()
        kill("ps", 0)"""
    file = tmp_path / "train.py"
    script = KILL + 'import time\ndone = pathlib.Path(os.environ["HERE"]) / "killed"\n' + counted(10, before=kill)
    if source == "stream":
        script = STREAM + script.replace("job.batches(data,", "job.batches(data_of,")
    elif source == "sampler":
        script = SAMPLER + script.replace("job.batches(data, 8, epochs=10)", "loaded()")
    file.write_text(PRELUDE + script)
    training = {"consistency": {"mode": "Async", "overlap": True}, "optimizer": SGD, "batch": {"base": 8}}
    env = {"HERE": str(tmp_path), "SAVE": str(tmp_path / "model.pt"), "OMP_NUM_THREADS": "1"}
    env |= {"PSJOBS_WORKER": program("psjobs-worker")}
    job = psjobs.run(
        file, trainers=1, servers=2, training=training, spec=CHECKPOINTS, env=env, folder=tmp_path, quiet=True
    )
    logs = list(job.logs(index=0))
    rewinds = [int(line.split()[1]) for line in logs if line.startswith("rewinds")]
    assert "killed ps 0" in logs and len(rewinds) == 1, logs
    # What cannot be read again is read by another process, whose servers do not go back.
    assert (rewinds[0] > 0) == (source == "batches"), logs
    check_counted(job.model(), 120)
    if source != "sampler":
        # At the end of `batches` the model has all steps.
        check_counted(torch.load(tmp_path / "model.pt"), 120)


def test_trainers_of_an_elastic_job_make_each_batch_once(jobs: Jobs) -> None:
    job = jobs.start(*FLAGS, "--min-trainers", "1", trainers=2, **TRAINING)
    script = counted(4, before='print("read", *(x[:, None] == rows).all(2).nonzero()[:, 1].tolist())')
    script = script.replace("for x, y in job.batches(", "meet()\nfor x, y in job.batches(")
    said = succeed(*(job.trainer(index, script, PSJOB_MIN_TRAINERS="1") for index in range(2)))
    assert job.server.wait(DEADLINE) == 0 and "done steps=48" in job.log.read_text()
    lines = [line for text in said for line in text.splitlines() if line.startswith("read")]
    read = [int(word) for line in lines for word in line.split()[1:]]
    assert len(lines) == 48 and sorted(read) == sorted([*range(96)] * 4)


def test_a_gradient_that_is_not_finite_is_named_with_its_own_step(jobs: Jobs) -> None:
    job = jobs.start(*FLAGS, **TRAINING)
    trainer = job.trainer(0, counted(1, before="if job.step == 2: model[2].bias.grad[0] = float('nan')"))
    _, said = trainer.communicate(timeout=DEADLINE)
    assert trainer.returncode == 1
    assert "trainer 0: the gradient of 2.bias is not finite at step 2" in said, said


def test_in_sync_the_field_is_refused(jobs: Jobs) -> None:
    job = jobs.start(*FLAGS, **{**TRAINING, "consistency": {"mode": "Sync", "overlap": True}})
    _, error = job.trainer(0, TRAIN).communicate(timeout=DEADLINE)
    assert "spec.training.consistency.overlap" in error and "set mode to Async or Bounded" in error, error
