"""The page docs/python.md and its example, as users run them."""

import difflib
import json
import os
import pathlib
import subprocess
import sys

import pytest
from conftest import DEADLINE, ROOT, Jobs, Record, environment, program, succeed

PYTORCH = ROOT / "examples/pytorch"


def test_the_example_differs_from_plain_pytorch_in_five_lines_and_is_that_of_the_page() -> None:
    plain, ours = ((PYTORCH / name).read_text().splitlines() for name in ("mnist.py", "mnist_psjobs.py"))
    differences = [line for line in difflib.ndiff(plain, ours) if line.startswith("+ ")]
    assert len(differences) <= 5, differences
    page = (ROOT / "docs/python.md").read_text()
    typed = page.split("```python\n")[1].split("```")[0]
    assert typed in (PYTORCH / "mnist_psjobs.py").read_text()
    assert sum(line.removeprefix("+ ") in typed for line in differences) >= 3


# Scripts in their usual form, and what makes of each a trainer: arguments, optimizer, the metric that two trainers reach
# together, and its limit. Alone, the scripts reach an accuracy of .977 and .947, losses of 1.76 and 1.94 and an AUC of .762.
SCRIPTS = [
    ("convnet", [], "SGD", 0.05, "accuracy", 0.94),
    ("gpt", ["--steps", "300"], "AdamW", 3e-3, "loss", -2.2),
    ("dlrm", [], "Adagrad", 0.05, "auc", 0.73),
    ("lightning_module", [], "SGD", 0.1, "accuracy", 0.9),
    ("hf_trainer", [], "AdamW", 3e-3, "eval_loss", -2.1),
]


@pytest.mark.parametrize(("name", "args", "kind", "rate", "metric", "limit"), SCRIPTS, ids=[row[0] for row in SCRIPTS])
def test_a_script_joins_a_job_by_five_lines_and_learns(
    name: str, args: list[str], kind: str, rate: float, metric: str, limit: float, record_property: Record
) -> None:
    plain, ours = ((PYTORCH / f"{name}{end}.py").read_text().splitlines() for end in ("", "_psjobs"))
    differences = [line for line in difflib.ndiff(plain, ours) if line.startswith("+ ")]
    optimizer = {"type": kind, "learningRate": rate}
    variables = environment(PSJOBS_WORKER=program("psjobs-worker"))
    sets = ["--set", "training.consistency.mode=Sync", "--set", f"training.optimizer={json.dumps(optimizer)}"]
    command = [program("psjobs"), "run", "--json", "--no-progress", *sets]
    command += ["--", sys.executable, str(PYTORCH / f"{name}_psjobs.py"), *args]
    ran = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE)
    assert ran.returncode == 0, ran.stderr
    reached = json.loads(ran.stdout)["metrics"][metric]
    record_property(name, f"{len(differences)} lines differ, {metric} {reached:.3f}")
    assert len(differences) <= 5, differences
    assert reached >= limit if limit > 0 else reached <= -limit, (metric, reached)


def test_two_trainers_and_a_server_learn_mnist_from_the_example() -> None:
    # The manifest's python3 is the one that runs this test.
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = environment(PATH=path, PSJOBS_WORKER=program("psjobs-worker"))
    command = [program("psjobs"), "run", "--json", "--no-progress", PYTORCH / "mnist.yaml"]
    ran = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE)
    assert ran.returncode == 0, ran.stderr
    summary = json.loads(ran.stdout)
    assert (summary["state"], summary["trainers"], summary["servers"]) == ("Succeeded", 2, 1)
    assert summary["accuracy"] >= 0.9, summary
    assert summary["examples"] == 2 * 937 * 32, summary


@pytest.mark.parametrize("where", [[], ["here"]], ids=["alone", "here"])
def test_the_script_of_the_page_learns_alone_and_here(where: list[str]) -> None:
    script = PYTORCH / ("submit_circle.py" if where else "circle.py")
    variables = environment(PSJOBS_WORKER=program("psjobs-worker"))
    ran = subprocess.run([sys.executable, script, *where], env=variables, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE)
    assert ran.returncode == 0, ran.stderr
    assert "accuracy 0.9" in ran.stdout, ran.stdout
    if where:
        assert "trainer 1 of 2" in ran.stdout and "the centre is inside: True" in ran.stdout, ran.stdout


def test_the_page_for_users_of_ddp_trains(jobs: Jobs) -> None:
    page = (ROOT / "docs/coming-from-ddp.md").read_text()
    ddp, ours = (block.split("```")[0] for block in page.split("```python\n")[1:3])
    assert "DistributedDataParallel" in ddp and "DistributedDataParallel" not in ours
    before = "model, dataset, loss_fn, epochs = net(), data, loss, 2\nfrom torch.utils.data import DataLoader\n"
    adam = {"type": "Adam", "learningRate": 1e-3}
    job = jobs.start("--consistency", "sync", "--optimizer", "adam", "--learning-rate", "1e-3", trainers=2, optimizer=adam)
    said = succeed(*(job.trainer(index, f"{before}{ours}print('epochs done', job.step)") for index in range(2)))
    assert job.server.wait(DEADLINE) == 0
    for text in said:
        assert "epochs done 2" in text and "is not the job's" not in text, text
