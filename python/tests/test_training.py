"""Trainers of a job, and what they do to the model."""

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from conftest import DEADLINE, PRELUDE, Job, Jobs, environment, program, succeed

SCRIPT = """
job = psjobs.join()
model, opt = job.attach(net())
for number, (x, y) in enumerate(job.batches(data, 8, epochs=2, accumulate=ACCUMULATE)):
    (loss(model(x), y) / ACCUMULATE).backward()
    if (number + 1) % ACCUMULATE == 0:
        opt.step()
save(model)
"""

ADAM = {"type": "Adam", "learningRate": 0.01}
SGD = {"type": "SGD", "learningRate": 0.1}


def flags(optimizer: dict[str, Any]) -> tuple[str, ...]:
    kind, rate = optimizer["type"].lower(), str(optimizer["learningRate"])
    return ("--consistency", "sync", "--optimizer", kind, "--learning-rate", rate)


def script(accumulate: int) -> str:
    return SCRIPT.replace("ACCUMULATE", str(accumulate))


def same(one: pathlib.Path, other: pathlib.Path) -> bool:
    models = [torch.load(file) for file in (one, other)]
    assert models[0].keys() == models[1].keys()
    return all(torch.equal(models[0][name], models[1][name]) for name in models[0])


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["SGD", "Adam"])
def test_two_trainers_in_sync_are_bit_for_bit_one_that_accumulates(jobs: Jobs, optimizer: dict[str, Any]) -> None:
    two = jobs.start(*flags(optimizer), trainers=2, optimizer=optimizer)
    one = jobs.start(*flags(optimizer), trainers=1, optimizer=optimizer)
    succeed(two.trainer(0, script(1)), two.trainer(1, script(1)), one.trainer(0, script(2)))
    assert same(two.folder / "model-0.pt", two.folder / "model-1.pt")
    assert same(two.folder / "model-0.pt", one.folder / "model-0.pt")
    assert two.server.wait(DEADLINE) == 0 and one.server.wait(DEADLINE) == 0
    # The same in one process of torch, without servers: SGD, as it is defined, bit for bit. torch's own optimizers round
    # otherwise, as they fuse multiplication and addition.
    update = "for p in model.parameters(): p.data -= 0.1 * p.grad; p.grad = None"
    file = two.folder / "alone.py"
    file.write_text(PRELUDE + (script(2).replace("opt.step()", update) if optimizer is SGD else script(2)))
    variables = {"SAVE": str(two.folder / "alone.pt"), "PSJOB_TRAINING": json.dumps({"optimizer": optimizer})}
    subprocess.run([sys.executable, file], env=environment(**variables), check=True, capture_output=True)
    if optimizer is SGD:
        assert same(two.folder / "model-0.pt", two.folder / "alone.pt")
    ours, torchs = (torch.load(two.folder / name) for name in ("model-0.pt", "alone.pt"))
    for name in ours:
        assert torch.allclose(ours[name], torchs[name], rtol=1e-4, atol=1e-5), name


HEADS = """
class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.trunk, self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3), nn.Linear(16, 3).to(DTYPE)
    def forward(self, x, number):
        x = self.trunk(x).tanh()
        return self.first(x) if number % 2 else self.second(x.to(DTYPE)).float()
def gradients():
    return {name: p.grad.tolist() for name, p in model.named_parameters() if p.grad is not None}
job = psjobs.join()
model, opt = job.attach(Heads(), missing="zero")
for number, (x, y) in enumerate(job.batches(data, 8, epochs=2)):
    value = loss(model(x, number), y)
    if number % 3 == 0:
        (7 * value).backward(retain_graph=True)
        opt.zero_grad()
        assert not gradients()
    for _ in range(1 + number % 4 // 3):
        value.backward(retain_graph=True)
    if number % 5 == 1:
        model.trunk.bias.grad = torch.ones(16)
    if number % 5 == 2:
        model.trunk.weight.grad = None
    before = gradients()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    seen = gradients()
    assert len(before) == (3 if number % 5 == 2 else 4), before
    opt.step()
    CHECK
save(model)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_of_their_step_alone(jobs: Jobs, dtype: str) -> None:
    heads = HEADS.replace("DTYPE", f"torch.{dtype}")
    job = jobs.start(*flags(SGD), optimizer=SGD)
    succeed(job.trainer(0, heads.replace("CHECK", "assert gradients() == seen")))
    file = job.folder / "alone.py"
    update = "\n".join((
        "with torch.no_grad():",
        "        for p in model.parameters():",
        "            p.grad is None or p.copy_(p.to(torch.float32) - 0.1 * p.grad.float())",
        "            p.grad = None",
    ))
    file.write_text(PRELUDE + heads.replace("opt.step()", update).replace("CHECK", "pass"))
    subprocess.run([sys.executable, file], env=environment(SAVE=str(job.folder / "alone.pt")), check=True)
    ours, torchs = (torch.load(job.folder / name) for name in ("model-0.pt", "alone.pt"))
    if dtype == "float32":
        assert same(job.folder / "model-0.pt", job.folder / "alone.pt")
    # Servers keep f32 of what the model has in bf16.
    for name in ours:
        assert torch.allclose(ours[name], torchs[name], rtol=0.1, atol=0.05), name


def test_trainers_talk_tls_with_the_certificates_of_their_job(jobs: Jobs, tmp_path: pathlib.Path) -> None:
    certificates = tmp_path / "certificates"
    subprocess.run([program("psjobs"), "certificates", str(certificates)], check=True, capture_output=True)
    ours = {"PSJOB_TLS_DIR": str(certificates / "trainer")}
    plain = jobs.start(*flags(SGD), trainers=2, optimizer=SGD)
    safe = jobs.start(*flags(SGD), "--tls-dir", str(certificates / "ps"), trainers=2, optimizer=SGD)
    # Without a certificate, or with one of another job, a trainer waits in vain, and says why.
    others = tmp_path / "others"
    subprocess.run([program("psjobs"), "certificates", str(others)], check=True, capture_output=True)
    strangers: list[tuple[Job, dict[str, str], str]] = [
        (safe, {}, "this process needs its own: --tls-dir or PSJOB_TLS_DIR"),
        (safe, {"PSJOB_TLS_DIR": str(others / "trainer")}, "certificate is not of this job"),
        (plain, ours, "the other side talks without TLS"),
    ]
    for job, variables, words in strangers:
        stranger = job.trainer(0, script(1), **variables)
        assert stranger.stderr is not None
        assert any(words in line for line in stranger.stderr), words
        stranger.kill()
    succeed(*(plain.trainer(index, script(1)) for index in range(2)))
    succeed(*(safe.trainer(index, script(1), **ours) for index in range(2)))
    assert same(plain.folder / "model-0.pt", safe.folder / "model-0.pt")
    assert safe.server.wait(DEADLINE) == 0


KINDS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.turned = nn.Linear(4, 4, bias=False)
        self.turned.weight = nn.Parameter(torch.eye(4).t().contiguous().t() * 2)
        self.low = nn.Linear(4, 4).bfloat16()
        self.out = nn.Linear(4, 8, bias=False)
        self.out.weight = self.embed.weight
    def forward(self, x):
        x = self.turned(self.frozen(self.embed(x)))
        return self.out(self.low(x.bfloat16()).float())
torch.manual_seed(1)
raw = Model()
before = {name: value.clone() for name, value in raw.state_dict().items()}
job = psjobs.join()
model, opt = job.attach(raw)
assert model is raw and model.out.weight is model.embed.weight
assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
words = torch.arange(64) % 8
losses = []
for x, y in job.batches(TensorDataset(words, (words + 1) % 8), 8, epochs=8, num_workers=1):
    value = loss(model(x), y)
    losses.append(value.item())
    value.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
after = model.state_dict()
assert all(torch.equal(after[name], before[name]) == name.startswith("frozen") for name in after), after
assert model.low.weight.dtype is torch.bfloat16
assert losses[-1] < losses[0] / 2, losses
"""


def test_frozen_tied_turned_and_half_parameters_train_with_a_forked_loader(jobs: Jobs) -> None:
    job = jobs.start("--optimizer", "adam", "--learning-rate", "0.05", optimizer=ADAM)
    succeed(job.trainer(0, KINDS))
    assert job.server.wait(DEADLINE) == 0


SAVE = """
job = psjobs.join()
try:
    job.save("early")
    raise SystemExit(1)
except psjobs.InputError as error:
    assert "no model is attached yet" in str(error)
model, opt = job.attach(nn.Sequential(net(), nn.BatchNorm1d(3)))
for x, y in job.batches(data, 8):
    loss(model(x), y).backward()
    opt.step()
file = os.environ["SAVE"] + ".safetensors"
job.save(file)
assert os.path.exists(file) == (job.trainer == 0)
if job.trainer == 0:
    other = nn.Sequential(net(), nn.BatchNorm1d(3))
    other.load_state_dict(psjobs.safetensors.read(file))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
"""


def test_a_model_is_saved_with_its_buffers_by_one_trainer(jobs: Jobs) -> None:
    job = jobs.start("--consistency", "sync", trainers=2)
    succeed(*(job.trainer(index, SAVE) for index in range(2)))


SPLIT = """
job = psjobs.join()
model, opt = job.attach(net())
indices = TensorDataset(torch.arange(96))
read = {"batches": [], "share": [], "sampler": []}
def train():
    loss(model(rows[:2]), data[:2][1]).backward()
    opt.step()
for epoch in range(2):
    read["batches"].append([])
    for (numbers,) in job.batches(indices, 8):
        read["batches"][-1] += numbers.tolist()
        train()
shared = job.share(torch.utils.data.DataLoader(indices, batch_size=8, shuffle=True, num_workers=1))
assert len(shared) == 6
for epoch in range(2):
    read["share"].append([])
    for (numbers,) in shared:
        read["share"][-1] += numbers.tolist()
        train()
sampler = job.sampler(indices, 8)
for epoch in range(2):
    numbers = list(sampler)
    assert len(numbers) == len(sampler) == 48
    read["sampler"].append(numbers)
    [train() for _ in range(6)]
import json
print(json.dumps(read))
"""


def test_each_epoch_is_shared_out_without_overlap_in_an_order_of_its_own(jobs: Jobs) -> None:
    job = jobs.start("--consistency", "sync", trainers=2)
    said = succeed(job.trainer(0, SPLIT), job.trainer(1, SPLIT))
    read = [json.loads(next(line for line in text.splitlines() if line.startswith("{"))) for text in said]
    orders = set()
    for way in ("batches", "share", "sampler"):
        for epoch in range(2):
            parts = [trainer[way][epoch] for trainer in read]
            assert sorted(parts[0] + parts[1]) == list(range(96)), (way, epoch)
            orders.add(tuple(parts[0]))
    assert len(orders) == 6, "every epoch has its own order"


STREAM = """
class Numbers(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from range(100)
job = psjobs.join()
model, opt = job.attach(net())
for numbers in job.batches(Numbers(), 8, epochs=2):
    print("read", *numbers.tolist(), flush=True)
    loss(model(rows[:2]), data[:2][1]).backward()
    opt.step()
    if job.step == int(os.environ.get("DIES", 0)): os._exit(9)
"""


def test_data_without_a_length_are_shared_out_and_gone_on_with(jobs: Jobs) -> None:
    job = jobs.start("--consistency", "sync", trainers=2)
    other = job.trainer(1, STREAM)
    dies = job.trainer(0, STREAM, DIES="8")
    died, _ = dies.communicate(timeout=DEADLINE)
    assert dies.returncode == 9
    said = succeed(job.trainer(0, STREAM, PSJOB_INCARNATION="1"), other)
    read = [int(word) for text in (died, *said) for line in text.splitlines() if line.startswith("read") for word in line.split()[1:]]
    # Of 100 examples 6 rounds of 16 are whole. The process that died had read 8 of its 12 batches.
    assert sorted(read) == sorted([*range(96), *range(96)])


def test_an_optimizer_that_is_not_the_jobs_is_named_with_what_to_set(jobs: Jobs) -> None:
    job = jobs.start("--consistency", "sync", "--optimizer", "adam", optimizer=ADAM)
    text = """
job = psjobs.join()
model = net()
model, opt = job.attach(model, torch.optim.AdamW(model.parameters(), lr=0.003))
print(type(opt).__name__)
    """
    (said,) = succeed(job.trainer(0, text))
    assert "ServerOptimizer" in said
    assert """training.optimizer={"type": "AdamW", "learningRate": 0.003,""" in said, said
    assert "Adam with a learning rate of 0.01" in said


def test_a_restarted_trainer_goes_on_with_the_step_that_the_servers_do_not_have(jobs: Jobs) -> None:
    job = jobs.start("--consistency", "sync")
    broken = script(1).replace("opt.step()", "opt.step()\n        if job.step == 5: os._exit(9)")
    died = job.trainer(0, broken)
    assert died.wait(DEADLINE) == 9
    again = script(1).replace("save(model)", "print(number + 1, job.step)\nsave(model)")
    (said,) = succeed(job.trainer(0, again, PSJOB_INCARNATION="1"))
    assert said.startswith("19 24"), said


ELASTIC = """
job = psjobs.join()
model, opt = job.attach(net())
indices = TensorDataset(torch.arange(96))
for (numbers,) in job.batches(indices, 8, epochs=2):
    loss(model(rows[numbers]), data[numbers][1]).backward()
    opt.step()
    print("read", *numbers.tolist(), flush=True)
    if os.environ.get("DIES"): os._exit(9)
"""


def test_in_an_elastic_job_each_example_is_read_however_trainers_come_and_go(jobs: Jobs) -> None:
    job = jobs.start("--consistency", "sync", "--min-trainers", "1", trainers=2)
    elastic = {"PSJOB_MIN_TRAINERS": "1"}
    leaves = job.trainer(1, ELASTIC.replace("os._exit(9)", "os.kill(os.getpid(), 15)"), DIES="1", **elastic)
    left, _ = leaves.communicate(timeout=DEADLINE)
    assert leaves.returncode == 128 + 15
    (stays,) = succeed(job.trainer(0, ELASTIC, **elastic))
    read = [int(word) for line in (left + stays).splitlines() if line.startswith("read") for word in line.split()[1:]]
    assert sorted(read) == sorted([*range(96), *range(96)])
    assert job.server.wait(DEADLINE) == 0


ADAPTIVE = """
job = psjobs.join()
model, opt = job.attach(net())
indices = TensorDataset(torch.arange(96))
import time
for (numbers,) in job.batches(indices, 8, epochs=4):
    loss(model(rows[numbers]), data[numbers][1]).backward()
    # This trainer is slow by the example, as the other one is not.
    time.sleep(0.004 * len(numbers) * job.trainer)
    opt.step()
    print("read", *numbers.tolist(), flush=True)
"""


@pytest.mark.parametrize(
    ("training", "advice"),
    [
        ({"batch": {"microBatches": 4}}, "microBatches is for workloads in Rust; remove it, and call backward()"),
        ({"precision": {"autocast": "BF16"}}, "precision is for workloads in Rust; remove it, and use torch.autocast"),
        ({"precision": {"tf32": True}}, "precision is for workloads in Rust; remove it, and use torch.autocast"),
    ],
)
def test_fields_of_workloads_in_rust_are_refused(jobs: Jobs, training: dict[str, object], advice: str) -> None:
    job = jobs.start()
    job.training = training
    trainer = job.trainer(0, "psjobs.join()")
    _, said = trainer.communicate(timeout=DEADLINE)
    assert trainer.returncode == 2 and advice in said, said


def test_a_sampler_is_refused_with_an_adaptive_batch(jobs: Jobs) -> None:
    job = jobs.start("--adaptive-batch")
    job.training = {"batch": {"adaptive": True}}
    trainer = job.trainer(0, "job = psjobs.join()\njob.sampler(range(64))\n")
    _, said = trainer.communicate(timeout=DEADLINE)
    assert trainer.returncode == 2 and "read by job.batches or job.share" in said, said


def test_with_an_adaptive_batch_a_slow_trainer_reads_less_and_no_example_is_left_out(jobs: Jobs) -> None:
    job = jobs.start("--consistency", "sync", "--adaptive-batch", "--batch-size", "8", trainers=2)
    job.training = {"batch": {"base": 8, "adaptive": True}}
    said = succeed(job.trainer(0, ADAPTIVE), job.trainer(1, ADAPTIVE))
    steps = [[line.split()[1:] for line in text.splitlines() if line.startswith("read")] for text in said]
    fast, slow = steps
    assert len(fast) == len(slow) == 4 * 6
    for epoch in range(4):
        part = slice(6 * epoch, 6 * epoch + 6)
        read = [int(row) for step in [*fast[part], *slow[part]] for row in step]
        assert sorted(read) == list(range(96)), epoch
    assert len(slow[-1]) < len(fast[-1]), (slow[-1], fast[-1])


GROUPS = """
job = psjobs.join()
raw = net()
bias = [p for name, p in raw.named_parameters() if name.endswith("bias")]
weight = [p for name, p in raw.named_parameters() if name.endswith("weight")]
own = torch.optim.OPTIMIZER([{"params": weight}, {"params": bias, "lr": LR / 4, "weight_decay": 0.0}], lr=LR, weight_decay=0.125)
model, opt = job.attach(raw, own)
for number, (x, y) in enumerate(job.batches(data, 8, epochs=2, accumulate=ACCUMULATE)):
    (loss(model(x), y) / ACCUMULATE).backward()
    if (number + 1) % ACCUMULATE == 0:
        opt.step()
print("groups", *(group["lr"] for group in opt.param_groups), *(group["weight_decay"] for group in opt.param_groups))
save(model)
"""


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["SGD", "Adam"])
def test_parameter_groups_hold_at_the_servers(jobs: Jobs, optimizer: dict[str, Any]) -> None:
    kind, rate = optimizer["type"], optimizer["learningRate"]
    rule = {**optimizer, "weightDecay": 0.125}

    def grouped(accumulate: int) -> str:
        replaced = GROUPS.replace("OPTIMIZER", kind).replace("LR", str(rate))
        return replaced.replace("ACCUMULATE", str(accumulate))

    two = jobs.start(*flags(optimizer), "--weight-decay", "0.125", trainers=2, optimizer=rule)
    one = jobs.start(*flags(optimizer), "--weight-decay", "0.125", trainers=1, optimizer=rule)
    # The same groups as the job's own.
    groups = [{"parameters": "*bias", "learningRateFactor": 0.25, "weightDecay": 0}]
    spec = jobs.start(*flags(optimizer), "--weight-decay", "0.125", trainers=1, optimizer={**rule, "groups": groups})
    said = succeed(two.trainer(0, grouped(1)), two.trainer(1, grouped(1)), one.trainer(0, grouped(2)), spec.trainer(0, script(2)))
    for text in said[:3]:
        assert f"groups {rate} {rate / 4} 0.125 0.0" in text, text
        assert "psjobs: " not in text, "the script's optimizer is the job's"
    assert same(two.folder / "model-0.pt", two.folder / "model-1.pt")
    assert same(two.folder / "model-0.pt", one.folder / "model-0.pt")
    assert same(two.folder / "model-0.pt", spec.folder / "model-0.pt")
    # torch's own optimizer with these groups, alone: it rounds otherwise.
    file = two.folder / "alone.py"
    file.write_text(PRELUDE + grouped(2).replace("opt.step()", "opt.step(); opt.zero_grad()"))
    variables = {"SAVE": str(two.folder / "alone.pt")}
    subprocess.run([sys.executable, file], env=environment(**variables), check=True, capture_output=True)
    ours, torchs = (torch.load(two.folder / name) for name in ("model-0.pt", "alone.pt"))
    for name in ours:
        assert torch.allclose(ours[name], torchs[name], rtol=1e-4, atol=1e-5), name
    # The groups matter.
    plain = jobs.start(*flags(optimizer), "--weight-decay", "0.125", trainers=1, optimizer=rule)
    succeed(plain.trainer(0, script(2)))
    assert not same(two.folder / "model-0.pt", plain.folder / "model-0.pt")


def test_trainers_with_other_parameter_groups_are_refused(jobs: Jobs) -> None:
    job = jobs.start(*flags(SGD), trainers=2, optimizer=SGD)
    other = GROUPS.replace("OPTIMIZER", "SGD").replace("LR", "0.1").replace("ACCUMULATE", "1")
    first = job.trainer(0, other.replace("for number", "print('attached', flush=True)\nfor number"))
    assert first.stdout is not None
    assert any(line.startswith("attached") for line in first.stdout)
    second = job.trainer(1, script(1))
    _, said = second.communicate(timeout=DEADLINE)
    assert second.returncode == 2, said
    assert "the parameter group of 0.weight: in the job it has 1 times the job's learning rate and weight decay 0.125" in said, said


LEFT_OUT = """
job = psjobs.join()
raw = net()
OWN
model, opt = job.attach(raw, own)
before = {name: value.clone() for name, value in model.state_dict().items()}
for x, y in job.batches(data, 8):
    loss(model(x), y).backward()
    opt.step()
    schedule.step()
print("moved", *(name for name, value in model.state_dict().items() if not torch.equal(value, before[name])))
"""


def test_what_the_scripts_optimizer_lacks_stays_and_its_schedule_is_warned_of(jobs: Jobs) -> None:
    job = jobs.start("--learning-rate", "0.1", optimizer=SGD)
    own = "own = torch.optim.SGD(raw[2].parameters(), lr=0.1)\nschedule = torch.optim.lr_scheduler.StepLR(own, 1)"
    moved = LEFT_OUT.replace("OWN", own).replace("raw, own)", "raw, own)\nschedule = torch.optim.lr_scheduler.StepLR(opt, 1)")
    (said,) = succeed(job.trainer(0, moved))
    assert "moved 2.weight 2.bias\n" in said, said
    assert "does not have 0.weight, 0.bias, so they stay as they are" in said, said
    assert said.count("the script sets a learning rate of 0.01, the job's counts, 0.1 in step 1") == 1, said
    job = jobs.start("--learning-rate", "0.1", optimizer=SGD)
    foreign = "own = torch.optim.SGD([*raw.parameters(), nn.Parameter(torch.ones(5))], lr=0.1)"
    trainer = job.trainer(0, LEFT_OUT.replace("OWN", foreign))
    _, said = trainer.communicate(timeout=DEADLINE)
    assert trainer.returncode == 2, said
    assert "the optimizer has 1 parameters that the model does not have, of shapes [5]" in said, said


REFUSED = """
job = psjobs.join()
raw = net()
own = torch.optim.SGD(raw.parameters(), lr=0.1, MAXIMIZE)
FREEZE
model, opt = job.attach(raw, own)
loader = torch.utils.data.DataLoader(data, 8, SAMPLER)
for epoch in range(2):
    for x, y in job.share(loader):
        loss(model(x), y).backward()
        CHANGE
        opt.step()
"""
ADD = "if job.step == 2: opt.add_param_group({'params': [nn.Parameter(torch.ones(2))], 'lr': 0.1})"


@pytest.mark.parametrize(
    ("place", "text", "words"),
    [
        ("MAXIMIZE", "maximize=True", "servers minimize"),
        ("CHANGE", "raw[0].bias.requires_grad_(True)", "parameter 0.bias requires a gradient now"),
        ("CHANGE", ADD, "takes no others"),
        ("CHANGE", "if job.step == 2: raw.share_memory()", "parameter 0.weight and those behind it no longer lie"),
        ("SAMPLER", "sampler=torch.utils.data.WeightedRandomSampler(torch.ones(96), 96)", "the loader has a WeightedRandomSampler"),
    ],
    ids=["maximize", "unfrozen", "added", "moved", "weighted"],
)
def test_a_script_that_a_job_cannot_follow_is_refused_in_one_sentence(jobs: Jobs, place: str, text: str, words: str) -> None:
    job = jobs.start("--learning-rate", "0.1", optimizer=SGD)
    script = REFUSED.replace(place, text).replace("MAXIMIZE", "").replace("SAMPLER", "shuffle=True").replace("CHANGE", "pass")
    script = script.replace("FREEZE", "raw[0].bias.requires_grad_(False)" if "requires_grad" in text else "pass")
    trainer = job.trainer(0, script)
    _, said = trainer.communicate(timeout=DEADLINE)
    assert trainer.returncode == 2, said
    assert words in said, said


SELECTED = """
job = psjobs.join()
model, opt = job.attach(net())
indices, read = TensorDataset(torch.arange(96)), []
loader = torch.utils.data.DataLoader(indices, 8, sampler=torch.utils.data.SubsetRandomSampler(range(48)))
for (numbers,) in job.share(loader):
    read += numbers.tolist()
    loss(model(rows[numbers]), data[numbers][1]).backward()
    opt.step()
assert sorted(read) == list(range(48)), read
weight = torch.ones(1, requires_grad=True)
own = torch.optim.SGD([weight], 0.1, 0.9)
weight.sum().backward()
own.step()
opt.load_state_dict(opt.state_dict())
opt.load_state_dict(own.state_dict())
torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=12)
for x, y in job.batches(data, 8):
    loss(model(x), y).backward()
    opt.step()
"""


def test_a_loader_that_selects_examples_is_shared_out_and_a_loaded_state_is_warned_of(jobs: Jobs) -> None:
    job = jobs.start("--learning-rate", "0.1", optimizer=SGD)
    (said,) = succeed(job.trainer(0, SELECTED))
    assert said.count("what the script loads is ignored") == 1, said
