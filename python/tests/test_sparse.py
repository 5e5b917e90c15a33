"""Sparse modules: rows in the servers' tables, trained beside the parameters."""

import json
import pathlib
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import psjobs
import pytest
import torch
from conftest import DEADLINE, PRELUDE, Jobs, environment, succeed
from psjobs.sparse import SparseModules
from test_faults import train
from test_training import ADAM, SGD, flags, same

MODEL = """
class Clicks(nn.Module):
    def __init__(self, users=psjobs.Embedding(4), items=psjobs.EmbeddingBag(4, "sum")):
        super().__init__()
        torch.manual_seed(3)
        self.users, self.items, self.top = users, items, nn.Linear(8, 2)
    def forward(self, users, items):
        return self.top(torch.cat([self.users(users), self.items(items)], 1))
users = torch.arange(96) * 7919 % 13 - 6
items = torch.arange(96 * 3).view(96, 3) * 104729 % 11 + 2**40
clicks = TensorDataset(users, items, (users + items.sum(1)) % 2)
def save_all(model):
    model.eval()
    with torch.no_grad():
        rows = {"users": model.users(torch.arange(-6, 7)), "items": model.items(torch.arange(11).view(11, 1) + 2**40)}
    torch.save({**model.state_dict(), **rows}, os.environ["SAVE"])
"""

SCRIPT = (
    MODEL
    + """
job = psjobs.join()
model, opt = job.attach(Clicks())
for number, (user, item, y) in enumerate(job.batches(clicks, 8, epochs=3, accumulate=ACCUMULATE)):
    (loss(model(user, item), y) / ACCUMULATE).backward()
    if (number + 1) % ACCUMULATE == 0:
        opt.step()
save_all(model)
print("memory", sum(p.numel() for p in model.parameters()), *model.state_dict())
"""
)


def script(accumulate: int) -> str:
    return SCRIPT.replace("ACCUMULATE", str(accumulate))


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["SGD", "Adam"])
def test_rows_of_two_trainers_in_sync_are_those_of_one_that_accumulates(jobs: Jobs, optimizer: dict[str, Any]) -> None:
    two = jobs.start(*flags(optimizer), trainers=2, optimizer=optimizer)
    one = jobs.start(*flags(optimizer), trainers=1, optimizer=optimizer)
    said = succeed(two.trainer(0, script(1)), two.trainer(1, script(1)), one.trainer(0, script(2)))
    assert all("memory 18 top.weight top.bias" in text for text in said), "rows are no parameters of the model"
    assert same(two.folder / "model-0.pt", two.folder / "model-1.pt")
    assert same(two.folder / "model-0.pt", one.folder / "model-0.pt")
    assert two.server.wait(DEADLINE) == 0 and one.server.wait(DEADLINE) == 0
    # Without a job the same tables are in the script's own process.
    file = two.folder / "alone.py"
    file.write_text(PRELUDE + script(2))
    variables = {"SAVE": str(two.folder / "alone.pt"), "PSJOB_TRAINING": json.dumps({"optimizer": optimizer})}
    subprocess.run([sys.executable, file], env=environment(**variables), check=True, capture_output=True)
    ours, alone = (torch.load(two.folder / name) for name in ("model-0.pt", "alone.pt"))
    for name in ours:
        assert torch.allclose(ours[name], alone[name], rtol=1e-4, atol=1e-5), name


# The same model, whose rows come with the step before. Counts how often forward has to fetch rows after all.
AHEAD = (
    MODEL
    + """
class Counting:
    def __init__(self, session):
        self.session, self.pulls = session, 0
    def pull(self, *arguments):
        self.pulls += 1
        return self.session.pull(*arguments)
job = psjobs.join()
model, opt = job.attach(Clicks())
counting = Counting(model.users._puller)
job._sparse.read_from(counting)
keys = lambda batch: {model.users: batch[0], model.items: batch[1] KEYS}
for user, item, y in job.batches(clicks, 8, epochs=3, keys=keys):
    loss(model(user, item), y).backward()
    opt.step()
print("pulls", counting.pulls)
save_all(model)
"""
)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_rows_that_come_with_the_step_before_are_those_that_forward_would_fetch(jobs: Jobs, mode: str) -> None:
    trainers = 2 if mode == "sync" else 1
    plain, ahead, wrong = (jobs.start("--consistency", mode, trainers=trainers) for _ in range(3))
    succeed(*(plain.trainer(index, script(1)) for index in range(trainers)))
    said = succeed(*(ahead.trainer(index, AHEAD.replace("KEYS", "")) for index in range(trainers)))
    # In the first step, of both tables.
    assert all("pulls 2" in text for text in said), said
    # Of keys that were not foretold in full, forward fetches the rows.
    said = succeed(*(wrong.trainer(index, AHEAD.replace("KEYS", "[1:]")) for index in range(trainers)))
    assert not any("pulls 2" in text for text in said), said
    for job in (ahead, wrong):
        assert same(plain.folder / "model-0.pt", job.folder / "model-0.pt")


AS_TORCH = (
    MODEL
    + """
job = psjobs.join()
model, opt = job.attach(Clicks())
model.eval()
plain = Clicks(nn.Embedding(13, 4), nn.EmbeddingBag(11, 4, mode="sum"))
with torch.no_grad():
    plain.users.weight.copy_(model.users(torch.arange(-6, 7)))
    plain.items.weight.copy_(model.items(torch.arange(11).view(11, 1) + 2**40))
    plain.top.load_state_dict(model.top.state_dict())
model.train()
own = torch.optim.SGD(plain.parameters(), lr=0.1)
for user, item, y in job.batches(clicks, 8, epochs=3):
    own.zero_grad()
    loss(plain(user + 6, item - 2**40), y).backward()
    own.step()
    loss(model(user, item), y).backward()
    opt.step()
model.eval()
assert torch.allclose(model.users(torch.arange(-6, 7)), plain.users.weight, atol=1e-6)
assert torch.allclose(model.items(torch.arange(11).view(11, 1) + 2**40), plain.items.weight, atol=1e-6)
weights, offsets = torch.tensor([0.5, 2.0, 1.0]), torch.tensor([0, 1])
keys = torch.tensor([3, 4, 3]) + 2**40
bags = model.items(keys, offsets, weights)
assert torch.allclose(bags, plain.items(keys - 2**40, offsets, weights), atol=1e-6)
"""
)


@pytest.mark.parametrize(
    ("step", "other"),
    [
        ("", ""),
        ("loss(model(user, item), y).backward()", "value = loss(model(user, item), y); opt.zero_grad(); value.backward()"),
        ("loss(model(user, item), y).backward()", "\n    for _ in range(2): (loss(model(user, item), y) / 2).backward()"),
        ("model.train()", "model.eval()"),
    ],
    ids=["a step", "zero_grad before backward", "two that add up", "in eval mode"],
)
def test_sparse_modules_train_as_torchs_own(jobs: Jobs, step: str, other: str) -> None:
    job = jobs.start("--learning-rate", "0.1", optimizer=SGD)
    succeed(job.trainer(0, AS_TORCH.replace(step, other) if step else AS_TORCH))


def test_a_grad_scaler_unscales_the_gradients_of_rows(jobs: Jobs) -> None:
    job = jobs.start("--learning-rate", "0.1", optimizer=SGD)
    script = AS_TORCH.replace("job = psjobs.join()", "scaler = torch.amp.GradScaler('cpu')\njob = psjobs.join()")
    script = script.replace("loss(model(user, item), y).backward()", "scaler.scale(loss(model(user, item), y)).backward()")
    succeed(job.trainer(0, script.replace("    opt.step()", "    scaler.step(opt); scaler.update()")))


def test_a_grad_scaler_leaves_out_a_step_of_rows_whose_gradient_is_not_finite() -> None:
    rows, top = psjobs.Embedding(4), torch.nn.Linear(4, 1)
    model = torch.nn.ModuleList([rows, top])
    modules = SparseModules(model)
    modules.read_from(SimpleNamespace(pull=lambda *_: True))
    optimizer = modules.list_in(torch.optim.SGD(model.parameters(), 0.1))
    steps: list[list[float]] = []

    def note(*_: object) -> None:
        ((_, _, values),) = modules.gradients()
        steps.append(list(values))

    optimizer.register_step_post_hook(note)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (1.0, float("inf"), 2.0):
        optimizer.zero_grad()
        loss = (rows(torch.tensor([7])) * factor).sum() + top(torch.ones(1, 4)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert steps == [[1.0] * 4, [2.0] * 4]
    assert len(optimizer.param_groups[0]["params"]) == 2, "rows are no parameters of the optimizer after its step"


def test_a_fused_optimizer_refuses_scaled_gradients_of_rows() -> None:
    rows, top = psjobs.Embedding(4), torch.nn.Linear(4, 1)
    model = torch.nn.ModuleList([rows, top])
    modules = SparseModules(model)
    modules.read_from(SimpleNamespace(pull=lambda *_: True))
    optimizer = modules.list_in(torch.optim.Adam(model.parameters(), fused=True))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(top(rows(torch.tensor([7]))).sum()).backward()
    with pytest.raises(psjobs.InputError, match="fused=False"):
        scaler.step(optimizer)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("clicks.tensors = (users.float(), items, clicks.tensors[2])", "keys are int64, these are torch.float32"),
        ("raw(users, items)", "is not attached yet"),
        ("foretell = lambda batch: {nn.Linear(1, 1): batch[0]}", "names a module that is no sparse module"),
    ],
    ids=["no integers", "too early", "another module"],
)
def test_what_cannot_be_looked_up_is_one_sentence(jobs: Jobs, change: str, words: str) -> None:
    job = jobs.start()
    text = SCRIPT.replace("job.attach(Clicks())", f"job.attach(raw := Clicks())").replace("ACCUMULATE", "1")
    if "foretell" in change:
        text = text.replace("job = psjobs.join()", f"job = psjobs.join()\n{change}")
        text = text.replace("epochs=3,", "epochs=3, keys=foretell,")
    elif "raw" in change:
        text = text.replace("job = psjobs.join()", f"job = psjobs.join()\nraw = Clicks()\n{change}")
    else:
        text = text.replace("job = psjobs.join()", f"job = psjobs.join()\n{change}")
    trainer = job.trainer(0, text)
    _, said = trainer.communicate(timeout=DEADLINE)
    assert trainer.returncode == 2, said
    assert words in said, said


def test_an_elastic_job_has_no_sparse_modules(jobs: Jobs) -> None:
    job = jobs.start("--min-trainers", "1")
    trainer = job.trainer(0, script(1), PSJOB_MIN_TRAINERS="1")
    _, said = trainer.communicate(timeout=DEADLINE)
    assert trainer.returncode == 2 and "take elasticPolicy or backupTrainers from the job" in said, said


def test_servers_that_go_back_take_rows_along(tmp_path: pathlib.Path) -> None:
    checkpoints = {"checkpoint.volumeClaim": {"size": "1Gi"}, "checkpoint.intervalSeconds": 1}
    models = []
    for victim in ("", "ps 0"):
        logs, model = train(tmp_path / f"job{victim}", victim, checkpoints, rows=True)
        assert all((line == "rewinds 0") == (not victim) for line in logs if line.startswith("rewinds")), logs
        models.append(model)
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
