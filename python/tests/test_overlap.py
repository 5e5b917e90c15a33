"""Gradients that leave while backward() still computes others."""

import signal

import pytest
from conftest import DEADLINE, Jobs, succeed
from test_training import ADAM, SGD, flags, same

# Eight blocks; each layer has two.
WIDE = """
def wide():
    torch.manual_seed(3)
    layers = [layer for _ in range(4) for layer in (nn.Linear(700, 700), nn.Tanh())]
    return nn.Sequential(nn.Linear(6, 700), *layers, nn.Linear(700, 3))
"""

STEP = """
job = psjobs.join()
model, opt = job.attach(wide(), overlap=OVERLAP)
left = []
for x, y in job.batches(data, 8, epochs=2):
    for part in range(PARTS):
        rows = slice(part * 8 // PARTS, (part + 1) * 8 // PARTS)
        (loss(model(x[rows]), y[rows]) / PARTS).backward()
        left.append(opt._overlap.has_left)
    CHANGE
    opt.step()
save(model)
print("left", *map(int, left), flush=True)
"""


def script(overlap: bool = True, parts: int = 1, change: str = "pass") -> str:
    return WIDE + STEP.replace("OVERLAP", str(overlap)).replace("PARTS", str(parts)).replace("CHANGE", change)


CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 0.1)"
OLD_CLIP = "for p in model.parameters(): p.grad.data.clamp_(-1e-4, 1e-4)"
# Twelve steps, of which two are watched.
ALL = ["0"] * 2 + ["1"] * 10
NEVER = ["0"] * 12


@pytest.mark.parametrize(
    ("label", "parts", "change", "left"),
    [
        ("one backward a step", 1, "pass", ALL),
        ("two, whose gradients add up", 2, "pass", ["0"] * 4 + ["0", "1"] * 10),
        ("clipped", 1, CLIP, NEVER),
        ("clipped behind the back of autograd", 1, OLD_CLIP, NEVER),
    ],
)
def test_overlap_changes_no_bit(jobs: Jobs, label: str, parts: int, change: str, left: list[str]) -> None:
    models = []
    for overlap in (True, False):
        job = jobs.start(*flags(ADAM), trainers=2, optimizer=ADAM)
        said = succeed(*(job.trainer(index, script(overlap, parts, change)) for index in range(2)))
        assert job.server.wait(DEADLINE) == 0
        for text in said:
            expected = left if overlap else ["0"] * len(left)
            assert text.split("left ")[1].splitlines()[0].split() == expected, (label, overlap, text)
        assert same(job.folder / "model-0.pt", job.folder / "model-1.pt"), label
        models.append(job.folder / "model-0.pt")
    assert same(*models), label


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("if job.step == 4: opt.zero_grad()", "discards a gradient"),
        (f"if job.step == 4: {CLIP}", "the script has changed a gradient"),
        ("if job.step == 4: loss(model(x), y).backward()", "backward() adds to the gradient of 9.bias"),
        ("if job.step == 4: continue", "backward() adds to the gradient of 9.bias"),
    ],
    ids=["discarded", "clipped", "grown", "skipped"],
)
def test_a_gradient_that_has_left_is_final(jobs: Jobs, change: str, words: str) -> None:
    job = jobs.start()
    trainer = job.trainer(0, script(change=change))
    _, said = trainer.communicate(timeout=DEADLINE)
    assert trainer.returncode == 2, said
    assert words in said and "overlap=False" in said, said


def test_a_trainer_that_is_killed_when_gradients_have_left_costs_no_bit(jobs: Jobs) -> None:
    undisturbed = jobs.start(*flags(SGD), trainers=2, optimizer=SGD)
    succeed(*(undisturbed.trainer(index, script()) for index in range(2)))
    job = jobs.start(*flags(SGD), trainers=2, optimizer=SGD)
    other = job.trainer(0, script())
    die = "if job.step == 5: assert opt._overlap.has_left; print('dies', flush=True); os.kill(os.getpid(), 9)"
    victim = job.trainer(1, script(change=die))
    assert victim.wait(DEADLINE) == -signal.SIGKILL
    assert victim.stdout is not None and "dies" in victim.stdout.read()
    succeed(job.trainer(1, script(), PSJOB_INCARNATION="1"), other)
    assert same(job.folder / "model-0.pt", undisturbed.folder / "model-0.pt")
    assert same(job.folder / "model-1.pt", undisturbed.folder / "model-0.pt")
