"""A second machine on this one: a network namespace with a link of a limited rate to it."""

from __future__ import annotations

import os
import subprocess
from types import TracebackType
from typing import Self

INSIDE = "psjobs0"
"""The name of the link's end in the namespace."""
NETWORKS = 1 << 15
"""Networks of four addresses in 198.18.0.0/15, which is reserved for benchmarks (RFC 2544)."""


class OtherMachine:
    """A network namespace and a link to it, of so many Gbit/s each way; both go at the end of a `with` block.

    Raises OSError where it cannot be made, mostly for lack of rights.
    """

    def __init__(self, gigabits: float) -> None:
        self._namespace, self._device = f"psjobs-{os.getpid()}-other", f"psjobs{os.getpid()}"
        network = 4 * (os.getpid() % NETWORKS)
        here, self.there = (f"198.{18 + (network >> 16)}.{network >> 8 & 255}.{network + end & 255}" for end in (1, 2))
        inside = ["-n", self._namespace]
        shape = ["root", "tbf", "rate", f"{round(gigabits * 1000)}mbit", "burst", "4mb", "latency", "20ms"]
        try:
            _run("ip", "netns", "add", self._namespace)
            _run("ip", "link", "add", self._device, "type", "veth", "peer", "name", INSIDE, "netns", self._namespace)
            _run("ip", "addr", "add", f"{here}/30", "dev", self._device)
            _run("ip", "link", "set", self._device, "up")
            _run("ip", *inside, "addr", "add", f"{self.there}/30", "dev", INSIDE)
            _run("ip", *inside, "link", "set", "lo", "up")
            _run("ip", *inside, "link", "set", INSIDE, "up")
            _run("tc", "qdisc", "add", "dev", self._device, *shape)
            _run("tc", *inside, "qdisc", "add", "dev", INSIDE, *shape)
        except OSError as error:
            self._remove()
            text = "another machine cannot be played by a network namespace, which takes root and the programs ip and tc (iproute2)"
            raise OSError(f"{text}: {error}") from None

    @property
    def enter(self) -> list[str]:
        """The words in front of a command that make it run there."""
        return ["ip", "netns", "exec", self._namespace]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        # The link goes first: with its namespace it would go at some later time. A part that could not be made need not go.
        for command in (["link", "del", self._device], ["netns", "del", self._namespace]):
            try:
                _run("ip", *command)
            except OSError:
                pass


def _run(*command: str) -> None:
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise OSError(f"{' '.join(command)}: {ended.stderr.strip()}")
