"""Gradients that leave while backward() still computes others."""

import signal

import pytest
import torch
from conftest import DEADLINE, Jobs, succeed
from psjobs import memory
from test_training import ADAM, SGD, flags, same

# Eight blocks; each layer has two.
WIDE = """
def wide():
    torch.manual_seed(3)
    layers = [layer for _ in range(4) for layer in (nn.Linear(700, 700), nn.Tanh())]
    return nn.Sequential(nn.Linear(6, 700), *layers, nn.Linear(700, 3))
"""

STEP = """
from psjobs import memory
PLACE = memory.DeviceMemory.__name__ if memory.is_apart(torch.device(DEVICE)) else memory.SharedMemory.__name__
job = psjobs.join()
model, opt = job.attach(MODEL().to(DEVICE, DTYPE), overlap=OVERLAP)
assert type(opt._parameters.memory).__name__ == PLACE
left = []
for x, y in job.batches(data, 8, epochs=2):
    x, y = x.to(DEVICE), y.to(DEVICE)
    for part in range(PARTS):
        rows = slice(part * 8 // PARTS, (part + 1) * 8 // PARTS)
        (loss(model(x[rows].to(DTYPE)).float(), y[rows]) / PARTS).backward()
        left.append(opt._overlap.has_left)
    CHANGE
    opt.step()
save(model)
print("left", *map(int, left), flush=True)
"""


# The host as a GPU: gradients and values are copied between its memory and that of the servers, the gradients of the wide
# model in some twenty pieces, most of which begin within a block.
APART = "from psjobs import memory; memory.is_apart = lambda device: True; memory.PIECE = 100_000"

PLACES = ["cpu", "apart", "cuda"]


def require(place: str) -> None:
    """Skips the test on a machine that does not have the place."""
    if place == "cuda" and not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")


def script(
    overlap: bool = True,
    parts: int = 1,
    change: str = "pass",
    dtype: str = "float32",
    model: str = "wide",
    place: str = "cpu",
) -> str:
    begin = APART if place == "apart" else ""
    device = "cuda" if place == "cuda" else "cpu"
    text = STEP.replace("OVERLAP", str(overlap)).replace("PARTS", str(parts)).replace("CHANGE", change)
    text = text.replace("DTYPE", f"torch.{dtype}").replace("MODEL", model).replace("DEVICE", f'"{device}"')
    return begin + WIDE + text


def test_pieces_of_gradients_leave_the_last_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PIECE", 8)
    shared = torch.full((39,), torch.nan)
    mine = memory.DeviceMemory(torch.zeros(39), shared, torch.device("cpu"))
    mine.gradients.copy_(torch.arange(39))
    offers: list[int] = []

    def offer(first: int) -> None:
        assert torch.equal(shared[first:], mine.gradients[first:])
        offers.append(first)

    # backward() has computed the gradients from element 20 on.
    mine.send(20, offer)
    assert offers == [31, 23, 20] and shared[:20].isnan().all()
    mine.finish(offer)
    assert offers == [31, 23, 20, 12, 4] and torch.equal(shared, mine.gradients)


CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 0.1)"
HIGH_CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 1e9)"
OLD_CLIP = "for p in model.parameters(): p.grad.data.clamp_(-1e-4, 1e-4)"
# Twelve steps, of which two are watched.
ALL = ["0"] * 2 + ["1"] * 10
NEVER = ["0"] * 12


TWICE = ["0"] * 4 + ["0", "1"] * 10


CASES = [
    ("one backward a step", 1, "pass", ALL, "float32"),
    ("two, whose gradients add up", 2, "pass", TWICE, "float32"),
    ("of parameters that are copied", 1, "pass", ALL, "bfloat16"),
    ("clipped", 1, CLIP, NEVER, "float32"),
    ("clipped behind the back of autograd", 1, OLD_CLIP, NEVER, "float32"),
    ("of copied ones, two that add up", 2, "pass", TWICE, "bfloat16"),
    ("of copied ones, clipped", 1, CLIP, NEVER, "bfloat16"),
    ("clipped by a limit that is not reached", 1, HIGH_CLIP, NEVER, "float32"),
    ("of copied ones, by a limit that is not reached", 1, HIGH_CLIP, NEVER, "bfloat16"),
]


# Each costs eight trainers' start; what a copy could change is in the first three.
@pytest.mark.parametrize(
    ("label", "parts", "change", "left", "dtype", "place"),
    [(*case, place) for place in PLACES for case in CASES[: 3 if place == "apart" else None]],
)
def test_overlap_changes_no_bit(
    jobs: Jobs, label: str, parts: int, change: str, left: list[str], dtype: str, place: str
) -> None:
    require(place)
    models = []
    for overlap in (True, False):
        job = jobs.start(*flags(ADAM), trainers=2, optimizer=ADAM)
        said = succeed(*(job.trainer(index, script(overlap, parts, change, dtype, place=place)) for index in range(2)))
        assert job.server.wait(DEADLINE) == 0
        for text in said:
            expected = left if overlap else ["0"] * len(left)
            assert text.split("left ")[1].splitlines()[0].split() == expected, (label, overlap, text)
        assert same(job.folder / "model-0.pt", job.folder / "model-1.pt"), label
        models.append(job.folder / "model-0.pt")
    assert same(*models), label


@pytest.mark.parametrize(("place", "dtype"), [("cpu", "float32"), ("cpu", "bfloat16"), ("apart", "float32"), ("cuda", "float32")])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("if job.step == 4: opt.zero_grad()", "discards a gradient"),
        (f"if job.step == 4: {CLIP}", "the script has changed a gradient"),
        ("if job.step == 4: loss(model(x.to(DTYPE)).float(), y).backward()", "backward() adds to the gradient of 9.bias"),
        ("if job.step == 4: continue", "backward() adds to the gradient of 9.bias"),
    ],
    ids=["discarded", "clipped", "grown", "skipped"],
)
def test_a_gradient_that_has_left_is_final(
    jobs: Jobs, change: str, words: str, dtype: str, place: str
) -> None:
    require(place)
    job = jobs.start()
    trainer = job.trainer(0, script(change=change, dtype=dtype, place=place))
    _, said = trainer.communicate(timeout=DEADLINE)
    assert trainer.returncode == 2, said
    assert words in said and "overlap=False" in said, said


@pytest.mark.parametrize("model", ["net", "wide"])
def test_a_trainer_that_is_killed_when_gradients_have_left_costs_no_bit(
    jobs: Jobs, model: str
) -> None:
    train = script(model=model)
    undisturbed = jobs.start(*flags(SGD), trainers=2, optimizer=SGD)
    succeed(*(undisturbed.trainer(index, train) for index in range(2)))
    job = jobs.start(*flags(SGD), trainers=2, optimizer=SGD)
    other = job.trainer(0, train)
    die = "if job.step == 5: assert opt._overlap.has_left; print('dies', flush=True); os.kill(os.getpid(), 9)"
    victim = job.trainer(1, script(change=die, model=model))
    assert victim.wait(DEADLINE) == -signal.SIGKILL
    assert victim.stdout is not None and "dies" in victim.stdout.read()
    succeed(job.trainer(1, train, PSJOB_INCARNATION="1"), other)
    assert job.server.wait(DEADLINE) == 0 and "done steps=24" in job.log.read_text()
    ours, theirs, expected = (
        folder / f"model-{index}.pt" for folder, index in ((job.folder, 0), (job.folder, 1), (undisturbed.folder, 0))
    )
    assert same(ours, theirs)
    assert same(ours, expected)
