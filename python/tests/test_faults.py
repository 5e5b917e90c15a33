"""Servers and trainers that are killed, as Python trainers see it: none of it costs a bit in Sync."""

import pathlib
from typing import Any

import psjobs
import pytest
import torch
from conftest import PRELUDE, program

# Kills a process of the script's job.
KILL = """
import pathlib, signal
def kill(role, index):
    wanted = {f"PSJOB_ROLE={role}", f"PSJOB_INDEX={index}", f"PSJOB_UID={os.environ['PSJOB_UID']}"}
    for file in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = file.read_text().split("\\0")
        except OSError:
            continue
        if wanted <= set(variables):
            print("killed", role, index, flush=True)
            os.kill(int(file.parent.name), signal.SIGKILL)
"""

# Trainer 1 kills whom VICTIM names in the first step in which there is a checkpoint, once.
TRAIN = KILL + """
def wide():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 100), nn.Tanh(), nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 3))
class WithRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.wide = psjobs.Embedding(6), wide()
    def forward(self, x):
        return self.wide(x + self.rows((x[:, 0] * 10).long()))
job = psjobs.join()
model, opt = job.attach(WithRows() if os.environ["ROWS"] else wide())
here = pathlib.Path(os.environ["HERE"])
done = here / "killed"
for x, y in job.batches(data, 8, epochs=EPOCHS):
    loss(model(x), y).backward()
    is_due = job.trainer == 1 and os.environ["VICTIM"] and not done.exists()
    if is_due and any((here / "checkpoints").rglob("manifest.json")):
        done.touch()
        role, index = os.environ["VICTIM"].split()
        kill(role, index)
    opt.step()
print("rewinds", job._rewinds)
"""

CHECKPOINTS = {"checkpoint.volumeClaim": {"size": "1Gi"}, "checkpoint.intervalSeconds": 1}
# What is killed, what the job has against it, and whether trainers go back to a checkpoint.
FAULTS = [
    ("ps 0", CHECKPOINTS, True),
    ("ps 1", {**CHECKPOINTS, "ps.replicationFactor": 2}, False),
    ("trainer 0", CHECKPOINTS, False),
]


def train(
    folder: pathlib.Path, victim: str, spec: dict[str, Any], rows: bool = False
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Runs the job, of a model with sparse rows or without; returns what its trainers wrote, and the model."""
    folder.mkdir()
    file = folder / "train.py"
    file.write_text(PRELUDE + TRAIN.replace("EPOCHS", "50"))
    training = {"consistency": {"mode": "Sync"}, "optimizer": {"type": "Adam", "learningRate": 0.01}}
    env = {"VICTIM": victim, "HERE": str(folder), "ROWS": "yes" if rows else ""}
    env |= {"PSJOBS_WORKER": program("psjobs-worker"), "OMP_NUM_THREADS": "1"}
    job = psjobs.run(file, trainers=2, servers=2, training=training, spec=spec, env=env, folder=folder, quiet=True)
    return [line for index in range(2) for line in job.logs(index=index)], job.model()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The model of a job in which nothing is killed."""
    logs, model = train(tmp_path_factory.mktemp("undisturbed") / "job", "", CHECKPOINTS)
    assert logs.count("rewinds 0") == 2
    return model


@pytest.mark.parametrize(
    ("victim", "spec", "goes_back"), FAULTS, ids=["server 0", "server 1, held twice", "the other trainer"]
)
def test_what_is_killed_in_a_step_costs_no_bit(
    tmp_path: pathlib.Path,
    undisturbed: dict[str, torch.Tensor],
    victim: str,
    spec: dict[str, Any],
    goes_back: bool,
) -> None:
    logs, model = train(tmp_path / "job", victim, spec)
    assert f"killed {victim}" in logs, logs
    rewinds = [int(line.split()[1]) for line in logs if line.startswith("rewinds")]
    assert len(rewinds) == 2 and all((count > 0) == goes_back for count in rewinds), logs
    assert model.keys() == undisturbed.keys()
    assert all(torch.equal(model[name], undisturbed[name]) for name in model)
