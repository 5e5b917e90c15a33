"""Trainers in Python and in Rust share the client, the order of the data and libtorch."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from conftest import Job, Jobs, environment, program, succeed
from test_training import ADAM, SGD, flags, script

# The model and the data of the other scripts, as files that a trainer in Rust reads.
EXPORT = """
torch.jit.script(net()).save(os.environ["SAVE"])
with open(os.environ["SAVE"] + ".csv", "w") as file:
    for row, target in data:
        print(*row.tolist(), target.item(), sep=",", file=file)
"""


def train_in_rust(job: Job, epochs: int) -> dict[str, torch.Tensor]:
    """Two trainers in Rust, with the scripts' model and data, make so many epochs; returns the model's parameters."""
    module, trained = job.folder / "module.pt", job.folder / "trained.pt"
    subprocess.run([sys.executable, job.write(EXPORT)], env=environment(SAVE=str(module)), check=True)
    train = f"train torchscript --device cpu --model {module} --loss cross-entropy --epochs {epochs} --save {trained}"
    examples = f"--data {module}.csv --test-data {module}.csv"
    command = (program("psjobs-worker"), *train.split(), *examples.split())
    succeed(*(job.start(index, *command) for index in range(2)))
    parameters: dict[str, torch.Tensor] = torch.jit.load(trained).state_dict()
    return parameters


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["SGD", "Adam"])
def test_two_python_trainers_end_with_the_bits_of_two_rust_trainers(jobs: Jobs, optimizer: dict[str, Any]) -> None:
    groups = [{"parameters": "*bias", "learningRateFactor": 0.25, "weightDecay": 0}]
    training = {"optimizer": {**optimizer, "weightDecay": 0.125, "groups": groups}, "batch": {"base": 8}}
    python, rust = (jobs.start(*flags(optimizer), "--weight-decay", "0.125", trainers=2, **training) for _ in range(2))
    # The compiled module rounds otherwise than the one that it was made of.
    compiled = script(1).replace("net()", "torch.jit.script(net())")
    succeed(*(python.trainer(index, compiled) for index in range(2)))

    ours, theirs = torch.load(python.folder / "model-0.pt"), train_in_rust(rust, 2)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
