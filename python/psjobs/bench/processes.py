"""Servers and trainers of a case as processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from psjobs.bench.other_machine import OtherMachine
from psjobs.bench.parts import Size

SYNC: Mapping[str, Any] = {"consistency": {"mode": "Sync"}}
PORT = 2222
"""Where a server of another machine listens."""


class Server:
    """The one server of a job: how to start it."""

    def __init__(
        self,
        *flags: str,
        trainers: int = 1,
        training: Mapping[str, Any] = SYNC,
        machine: OtherMachine | None = None,
    ) -> None:
        self.flags, self.trainers, self.training, self.machine = flags, trainers, training, machine

    def address(self) -> str:
        """A free address for it."""
        if self.machine is not None:
            return f"{self.machine.there}:{PORT}"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return f"127.0.0.1:{free.getsockname()[1]}"


@dataclass
class Place:
    """The environment of a process of a job."""

    server: Server
    address: str
    uid: str

    def of(self, role: str, index: int) -> dict[str, str]:
        """Its variables."""
        return {
            "PSJOB_NAME": "bench",
            "PSJOB_NAMESPACE": "default",
            "PSJOB_UID": self.uid,
            "PSJOB_ROLE": role,
            "PSJOB_INDEX": str(index),
            "PSJOB_SERVERS": self.address,
            "PSJOB_TRAINERS": str(self.server.trainers),
            "PSJOB_TRAINING": json.dumps(self.server.training),
            "RUST_LOG": "error",
        }


def part(name: str, size: Size, server: Server | None = None, threads: int = 1) -> float:
    """What a part of a case measures in a process of its own: without a server alone, else as each trainer of that server's
    job, all of them together."""
    data = os.environ.get("PSJOB_DATA")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PSJOB_")}
    inherited |= {"OMP_NUM_THREADS": str(threads)} | ({} if data is None else {"PSJOB_DATA": data})
    command = [sys.executable, "-P", "-m", "psjobs.bench", "--part", name, "--examples", str(size.examples)]
    if size.steps is not None:
        command += ["--steps", str(size.steps)]
    if server is None:
        return float(subprocess.run(command, env=inherited, stdout=subprocess.PIPE, check=True).stdout)
    place = Place(server, server.address(), str(uuid.uuid4()))
    with ExitStack() as stack:
        serving = stack.enter_context(subprocess.Popen(_serve(server, place.address), env=inherited | place.of("ps", 0)))
        stack.callback(serving.terminate)
        trainers = []
        for index in range(server.trainers):
            environment = inherited | place.of("trainer", index)
            training = stack.enter_context(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
            stack.callback(training.kill)
            trainers.append(training)
        return sum(_figure(trainer) for trainer in trainers)


def _serve(server: Server, address: str) -> list[str]:
    worker = os.environ.get("PSJOBS_WORKER")
    start = [worker] if worker else [sys.executable, "-P", "-c", "from psjobs.__main__ import worker; worker()"]
    enter = [] if server.machine is None else server.machine.enter
    return [*enter, *start, "serve", "--port", address.rpartition(":")[2], *server.flags]


def _figure(trainer: subprocess.Popen[bytes]) -> float:
    text, _ = trainer.communicate()
    if trainer.returncode != 0:
        raise subprocess.CalledProcessError(trainer.returncode, trainer.args)
    return float(text)
