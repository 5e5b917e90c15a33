"""The page docs/python.md and its example, as users run them."""

import difflib
import json
import os
import pathlib
import subprocess
import sys

from conftest import DEADLINE, ROOT, environment, program

PYTORCH = ROOT / "examples/pytorch"


def test_the_example_differs_from_plain_pytorch_in_five_lines_and_is_that_of_the_page() -> None:
    plain, ours = ((PYTORCH / name).read_text().splitlines() for name in ("mnist.py", "mnist_psjobs.py"))
    differences = [line for line in difflib.ndiff(plain, ours) if line.startswith("+ ")]
    assert len(differences) <= 5, differences
    page = (ROOT / "docs/python.md").read_text()
    typed = page.split("```python\n")[1].split("```")[0]
    assert typed in (PYTORCH / "mnist_psjobs.py").read_text()
    assert sum(line.removeprefix("+ ") in typed for line in differences) >= 3


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
