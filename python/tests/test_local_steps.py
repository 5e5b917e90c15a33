"""Trainers that make steps alone between two exchanges (`spec.training.local`)."""

from typing import Any

import pytest
import torch
from conftest import DEADLINE, Jobs, succeed
from test_rust_trainers import train_in_rust

STEPS = 5
LOCAL = {"steps": STEPS}
SGD = {"type": "SGD", "learningRate": 0.1, "momentum": 0.9}
FLAGS = ("--consistency", "sync", "--local-steps", str(STEPS))

# 24 steps: the last exchange is a short one, made when the job is left.
SCRIPT = """
job = psjobs.join()
model, opt = job.attach(net())
for x, y in job.batches(data, 8, epochs=4):
    loss(model(x), y).backward(); opt.step()
assert job.step == 24, job.step
job.leave()
save(model)
"""


@pytest.mark.parametrize("overlap", [False, True])
def test_two_python_trainers_end_where_two_rust_trainers_do(jobs: Jobs, overlap: bool) -> None:
    training: dict[str, Any] = {"optimizer": SGD, "local": {**LOCAL, "overlap": overlap}, "batch": {"base": 8}}
    training |= {"schedule": {"type": "Linear", "totalSteps": 24, "end": 0.25}}
    python, rust = (jobs.start(*FLAGS, trainers=2, **training) for _ in range(2))
    compiled = SCRIPT.replace("net()", "torch.jit.script(net())")
    succeed(*(python.trainer(index, compiled) for index in range(2)))

    models = [torch.load(python.folder / f"model-{index}.pt") for index in range(2)]
    for name, tensor in train_in_rust(rust, 4).items():
        assert torch.equal(models[0][name], models[1][name]), name
        assert torch.allclose(models[0][name], tensor, rtol=1e-4, atol=1e-5), name


def test_the_scripts_own_optimizer_makes_the_steps_and_a_killed_trainer_makes_its_open_ones_again(jobs: Jobs) -> None:
    own = "job.attach(model := net(), torch.optim.SGD(model.parameters(), 0.1))"
    script = SCRIPT.replace("job.attach(net())", own).replace("loss(model", "opt.zero_grad(); loss(model")
    training: dict[str, Any] = {"local": LOCAL, "batch": {"base": 8}}
    undisturbed, disturbed = (jobs.start(*FLAGS, trainers=2, **training) for _ in range(2))
    succeed(*(undisturbed.trainer(index, script) for index in range(2)))

    # It dies after two steps of its second exchange. SGD has no state that could be lost.
    dying = script.replace("opt.step()\n", "opt.step()\n    if job.step == 7: os.kill(os.getpid(), 9)\n")
    steady, killed = disturbed.trainer(0, script), disturbed.trainer(1, dying)
    assert killed.wait(DEADLINE) == -9
    succeed(steady, disturbed.trainer(1, script, PSJOB_INCARNATION="1"))
    for index in range(2):
        want, found = (torch.load(job.folder / f"model-{index}.pt") for job in (undisturbed, disturbed))
        assert all(torch.equal(want[name], found[name]) for name in want)


def test_a_half_precision_module_sends_only_what_its_steps_changed(jobs: Jobs) -> None:
    script = """
job = psjobs.join()
model, opt = job.attach(net().bfloat16())
for x, y in job.batches(data, 8, epochs=2):
    loss(model(x.bfloat16()), y).backward(); opt.zero_grad(); opt.step()
job.leave()
save(model)
"""
    job = jobs.start(*FLAGS, trainers=1, optimizer={"type": "SGD", "learningRate": 0.1}, local=LOCAL)
    succeed(job.trainer(0, script))
    # Without gradients nothing changes, although the servers' f32 values are not those of bf16.
    torch.manual_seed(3)
    want = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).bfloat16().state_dict()
    found = torch.load(job.folder / "model-0.pt")
    assert all(torch.equal(want[name], found[name]) for name in want)


def test_a_trainer_whose_local_steps_are_not_the_jobs_is_refused(jobs: Jobs) -> None:
    job = jobs.start("--consistency", "sync", trainers=1)
    trainer = job.trainer(0, SCRIPT, PSJOB_TRAINING='{"local": {"steps": 5}}')
    _, error = trainer.communicate(timeout=DEADLINE)
    assert trainer.returncode != 0
    assert "exchanges after 5 steps that it makes alone, and a trainer of this job in every step" in error, error


@pytest.mark.parametrize(("kind", "overlap"), [("AdamW", False), ("RMSprop", False), ("AdamW", True)])
def test_trainers_of_an_elastic_job_read_whole_exchanges(jobs: Jobs, kind: str, overlap: bool) -> None:
    local = {**LOCAL, "overlap": overlap}
    training: dict[str, Any] = {"optimizer": {"type": kind, "learningRate": 0.01}, "local": local, "batch": {"base": 8}}
    elastic = ("--min-trainers", "1", "--local-steps", str(STEPS))
    job = jobs.start(*elastic, trainers=2, **training)
    script = SCRIPT.replace("for x, y in", "meet()\nfor x, y in", 1)
    script = script.replace("assert job.step == 24, job.step\n", "report = sys.stderr.write(f'did {job._steps_done} steps')\n")
    trainers = [job.trainer(index, script, PSJOB_MIN_TRAINERS="1") for index in range(2)]
    succeed(*trainers)
    assert job.server.wait(DEADLINE) == 0
    # 48 batches of 8 in ten exchanges, the last one of three batches.
    log = job.log.read_text()
    assert "steps=50" in log or "steps\x1b[0m\x1b[2m=\x1b[0m50" in log, log
