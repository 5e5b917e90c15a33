"""Jobs of one server, started by hand, whose trainers are scripts of the tests."""

import contextlib
import functools
import itertools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

from warm_python import Original, WarmPython

# A shell that starts a program in the background lets it ignore Ctrl-C, and so its trainers: those of the tests must not.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The sources beside the tests are not the package: they lack the native module. Neither are they in what tests start.
os.environ["PYTHONSAFEPATH"] = "1"

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE = 180

# What every script begins with: a small model and data that need no file.
PRELUDE = """
import os, sys
import psjobs, torch
from torch import nn
from torch.utils.data import TensorDataset
torch.set_num_threads(1)
def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
rows = torch.arange(6 * 96, dtype=torch.float32).sin().view(96, 6)
data = TensorDataset(rows, rows.abs().argmax(1) % 3)
loss = nn.functional.cross_entropy
def save(model):
    torch.save({name: value.clone() for name, value in model.state_dict().items()}, os.environ["SAVE"])
def meet():
    # Waits until two trainers have joined: a short elastic job would be over before the second one has.
    import pathlib, time
    here = pathlib.Path(os.environ["SAVE"]).parent
    (here / f"joined-{os.getpid()}").touch()
    while len(list(here.glob("joined-*"))) < 2:
        time.sleep(0.01)
"""


def program(name: str) -> str:
    """The program that `make test-python` has built."""
    return os.environ.get("PSJOBS_WORKER" if name == "psjobs-worker" else "PSJOBS", str(ROOT / "target/debug" / name))


def environment(**more: str) -> dict[str, str]:
    """This process's variables, without those of a job, and `more`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PSJOB_")}
    return {**inherited, "OMP_NUM_THREADS": "1", **more}


# Test processes that run at the same time begin at different ports.
PORTS = itertools.count(os.getpid() * 97)


def free_port() -> int:
    """A port that no other test is given before a server has taken it, below those that the kernel gives to connections."""
    for number in PORTS:
        port = 20_000 + number % 10_000
        with socket.socket() as free, contextlib.suppress(OSError):
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError("the numbers do not end")


@functools.cache
def original() -> Original:
    """What the trainers of this process's tests are copies of."""
    return Original()


Record = Callable[[str, object], None]
"""`record_property`, the fixture: notes a figure of the test, which the summary shows."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the figures that tests noted."""
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{name}: {value}")


class Job:
    """A server and its trainers."""

    def __init__(self, folder: pathlib.Path, trainers: int, training: dict[str, object], flags: tuple[str, ...]) -> None:
        self.port = free_port()
        self.folder, self.trainers, self.training = folder, trainers, training
        self.log = folder / "server.log"
        place = ["--world-size", str(trainers + 1), "--rank", "0", "--master-port", str(self.port)]
        with self.log.open("w") as log:
            command = [program("psjobs-worker"), "serve", *place, *flags]
            self.server = subprocess.Popen(command, env=environment(), stderr=log, stdout=log)
        self.started: list[subprocess.Popen[str]] = []

    def trainer(self, index: int, script: str, **more: str) -> "subprocess.Popen[str]":
        """Starts a trainer; the script is behind PRELUDE."""
        process = WarmPython(original(), [str(self.write(script))], self.environment(index, more))
        self.started.append(process)
        return process

    def write(self, script: str) -> pathlib.Path:
        """Writes a script, behind PRELUDE, to a file of its own."""
        name = self.folder / f"script_{len(list(self.folder.glob('script_*')))}.py"
        name.write_text(PRELUDE + textwrap.dedent(script))
        return name

    def start(self, index: int, *command: str, **more: str) -> "subprocess.Popen[str]":
        """Starts a command as a trainer."""
        pipe, env = subprocess.PIPE, self.environment(index, more)
        process = subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)
        self.started.append(process)
        return process

    def environment(self, index: int, more: dict[str, str]) -> dict[str, str]:
        """A trainer's variables."""
        variables = {
            "PSJOB_NAME": "manual",
            "PSJOB_NAMESPACE": "default",
            "PSJOB_UID": "manual",
            "PSJOB_ROLE": "trainer",
            "PSJOB_INDEX": str(index),
            "PSJOB_SERVERS": f"127.0.0.1:{self.port}",
            "PSJOB_TRAINERS": str(self.trainers),
            "PSJOB_TRAINING": json.dumps(self.training),
            "SAVE": str(self.folder / f"model-{index}.pt"),
            **more,
        }
        return environment(**variables)

    def end(self) -> None:
        """Ends what still runs."""
        for process in [*self.started, self.server]:
            if process.poll() is None:
                process.kill()
            process.wait(DEADLINE)


class Jobs:
    """Starts jobs, and ends them after the test."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.started = folder, list[Job]()

    def start(self, *flags: str, trainers: int = 1, **training: object) -> Job:
        """A job whose server has these flags and whose trainers read `training` as spec.training."""
        folder = self.folder / f"job-{len(self.started)}"
        folder.mkdir()
        self.started.append(Job(folder, trainers, training, flags))
        return self.started[-1]


@pytest.fixture
def jobs(tmp_path: pathlib.Path) -> Iterator[Jobs]:
    """Jobs of this test."""
    jobs = Jobs(tmp_path)
    yield jobs
    for job in jobs.started:
        job.end()


def succeed(*trainers: "subprocess.Popen[str]") -> list[str]:
    """Waits for trainers, which must do their work; returns what they wrote."""
    said = [trainer.communicate(timeout=DEADLINE) for trainer in trainers]
    for trainer, (out, err) in zip(trainers, said):
        assert trainer.returncode == 0, out + err
    return [out + err for out, err in said]


def interrupt(process: "subprocess.Popen[str]") -> None:
    """Ctrl-C."""
    process.send_signal(signal.SIGINT)
