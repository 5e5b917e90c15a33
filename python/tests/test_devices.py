"""Models on a GPU, or on a CPU that is taken for one: their parameters are copied from and to the memory of the servers."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import DEADLINE, PRELUDE, Jobs, environment, succeed
from test_overlap import APART, PLACES, require
from test_training import SGD, flags, same

MODELS = {
    "one of many kinds": """
class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(1, 8, 3, padding=1)
        self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True)
        self.narrow = nn.Linear(12, 12).to(torch.bfloat16)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.out = nn.Linear(12, 3)
    def forward(self, x):
        x = self.convolution(x[:, None]).tanh()
        x, _ = self.lstm(x.transpose(1, 2))
        x = self.narrow(x[:, -1].bfloat16()).float().tanh()
        return self.out(self.scale * self.frozen(x))
model = Many()
""",
    "one of another order of elements": """
model = nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 8, 2, padding=1), nn.Tanh(), nn.Conv2d(8, 4, 2))
model = nn.Sequential(model, nn.Flatten(), nn.Linear(24, 3)).to(memory_format=torch.channels_last)
""",
}

TRAIN = """
import warnings
warnings.simplefilter("error")
torch.manual_seed(3)
MODEL
job = psjobs.join()
model, opt = job.attach(model.to("DEVICE"))
for x, y in job.batches(data, 8, epochs=4):
    loss(model(x.to("DEVICE")), y.to("DEVICE")).backward()
    opt.step()
job.leave()
save(model)
"""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_learns_what_it_learns_alone(jobs: Jobs, kind: str, place: str) -> None:
    require(place)
    train = TRAIN.replace("MODEL", MODELS[kind]).replace("DEVICE", "cuda" if place == "cuda" else "cpu")
    job = jobs.start(*flags(SGD), optimizer=SGD)
    succeed(job.trainer(0, (APART if place == "apart" else "") + train))
    assert job.server.wait(DEADLINE) == 0
    file = job.folder / "alone.py"
    file.write_text(PRELUDE + train)
    variables = {"SAVE": str(job.folder / "alone.pt"), "PSJOB_TRAINING": json.dumps({"optimizer": SGD})}
    subprocess.run([sys.executable, file], env=environment(**variables), check=True)
    ours, alone = (torch.load(job.folder / name, map_location="cpu") for name in ("model-0.pt", "alone.pt"))
    assert ours.keys() == alone.keys()
    for name, values in ours.items():
        # Servers keep f32 of what the model has in bf16, so that they add up what is too small for it.
        tolerance = 0.02 if values.dtype == torch.bfloat16 else 1e-3
        assert torch.allclose(values, alone[name], rtol=tolerance, atol=tolerance), name


def test_local_steps_are_made_on_a_gpu(jobs: Jobs) -> None:
    require("cuda")
    job = jobs.start("--consistency", "sync", "--local-steps", "4", trainers=2, optimizer=SGD, local={"steps": 4})
    train = TRAIN.replace("MODEL", "model = net()").replace("DEVICE", "cuda")
    succeed(*(job.trainer(index, train) for index in range(2)))
    models = [torch.load(job.folder / f"model-{index}.pt", map_location="cpu") for index in range(2)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_memory_that_cannot_be_pinned_is_copied_all_the_same(jobs: Jobs) -> None:
    require("cuda")
    # It is pinned already.
    again = """
from psjobs import memory
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    mine = opt._parameters.memory
    assert not memory.pin(torch.device("cuda"), mine._shared_values, mine.sent)
    assert "is not pinned" in str(warned[0].message)
for x, y"""
    train = TRAIN.replace("MODEL", "model = net()").replace("DEVICE", "cuda").replace("for x, y", again)
    job = jobs.start(*flags(SGD), optimizer=SGD)
    succeed(job.trainer(0, train))


def test_parameters_that_are_given_memory_of_their_own_after_attach_train_on(jobs: Jobs) -> None:
    train = TRAIN.replace("MODEL", "model = net()").replace("DEVICE", "cpu")
    moved = """    opt.step()
    for p in model.parameters():
        p.data = p.data.clone()
"""
    whole, own = (jobs.start(*flags(SGD), optimizer=SGD) for _ in range(2))
    succeed(whole.trainer(0, train), own.trainer(0, train.replace("    opt.step()\n", moved)))
    assert same(whole.folder / "model-0.pt", own.folder / "model-0.pt")


def test_a_trainer_with_a_gpu_says_that_its_model_is_on_the_cpu(jobs: Jobs) -> None:
    job = jobs.start(*flags(SGD), optimizer=SGD)
    train = TRAIN.replace("MODEL", "model = net()").replace("DEVICE", "cpu").replace('"error"', '"always"')
    (said,) = succeed(job.trainer(0, train, PSJOB_GPUS="2"))
    assert "was given a GPU" in said and 'model.to("cuda")' in said, said
