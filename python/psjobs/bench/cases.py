"""The cases: what is measured, and against what."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

from psjobs.bench.other_machine import OtherMachine
from psjobs.bench.parts import Size, mnist_folder
from psjobs.bench.processes import Server, part


@dataclass
class Case:
    """A line of the report."""

    case: str
    unit: str
    value: float
    limit: float
    of: str
    """What the limit is."""

    @property
    def ratio(self) -> float:
        """Value over limit."""
        return self.value / self.limit

    def __str__(self) -> str:
        return f"{self.case:>14}  {self.value:9.3f} {self.unit}, {self.ratio:6.3f} of {self.of} ({self.limit:.3f})"


@dataclass
class LeftOut:
    """A case that cannot be measured here."""

    case: str
    left_out: str
    """Why, and what to do about it."""

    def __str__(self) -> str:
        return f"{self.case:>14}  left out: {self.left_out}"


Lines = list[Case | LeftOut]


@dataclass
class Wish:
    """How the cases are to be measured."""

    runs: int
    size: Size
    gigabits: float
    """Rate of the link of `overlap`, each way."""


TCP = Server("--no-shared-memory")
SHARED = Server()
TRAINERS = 2
"""Trainers of `mnist`."""


def alternate(runs: int, *measures: Callable[[], float]) -> list[float]:
    """The medians of measures that alternate."""
    found = [[measure() for measure in measures] for _ in range(runs)]
    return [statistics.median(values) for values in zip(*found, strict=True)]


def exchange(case: str, server: Server, wish: Wish) -> Lines:
    """Steps/s of 100 MB from Python."""
    value, session, rpc = alternate(
        wish.runs, lambda: part("exchange", wish.size, server), lambda: part("session", wish.size, server), lambda: part("rpc", wish.size)
    )
    return [
        Case(case, "steps/s", value, rpc, "torch.distributed.rpc's over TCP"),
        Case(f"{case}-session", "steps/s", value, session, "the same session's in Rust, without torch"),
    ]


def small(wish: Wish) -> Lines:
    """Steps/s of 1,000 small tensors: forward, backward and `step`, without the time that it waits for the server."""
    value, limit = alternate(wish.runs, lambda: part("small", wish.size, SHARED), lambda: part("small-torch", wish.size))
    return [Case("small", "steps/s", value, limit, "torch's own Adam")]


def overlap(wish: Wish) -> Lines:
    """Seconds of a step whose backward takes as long as its exchange with a server behind a link, over the longer of the
    two."""
    try:
        machine = OtherMachine(wish.gigabits)
    except OSError as error:
        return [LeftOut("overlap", str(error))]
    with machine:
        server = Server("--no-shared-memory", machine=machine)
        size = wish.size
        # As many examples as make backward as long as the exchange.
        scale = part("exchange-layers", size, server) / part("backward", size)
        size = replace(size, examples=max(1, round(size.examples * scale)))
        together, backward, alone = alternate(
            wish.runs,
            lambda: part("overlap", size, server),
            lambda: part("backward", size),
            lambda: part("exchange-layers", size, server),
        )
    return [Case("overlap", "s", together, max(backward, alone), f"the longer of backward ({backward:.3f}) and exchange ({alone:.3f})")]


def mnist(wish: Wish) -> Lines:
    """Steps/s of two trainers and a server, which train a convolutional network, over twice the script alone."""
    folder = mnist_folder()
    if not (folder / "train-images-idx3-ubyte").exists():
        return [LeftOut("mnist", f"there is no MNIST in {folder}; scripts/mnist.sh of the repository fetches it")]
    server = Server(trainers=TRAINERS, training={})
    value, alone = alternate(wish.runs, lambda: part("mnist", wish.size, server), lambda: part("mnist", wish.size))
    return [Case("mnist", "steps/s", value, TRAINERS * alone, "twice the script alone")]


def gpu(wish: Wish) -> Lines:
    """Steps/s of a model on a GPU whose parameters a server has, over torch's own optimizer there."""
    import torch

    if not torch.cuda.is_available():
        return [LeftOut("gpu", "this machine has no CUDA device")]
    server = Server("--optimizer", "adam")
    value, limit = alternate(
        wish.runs, lambda: part("gpu", wish.size, server, threads=4), lambda: part("gpu-torch", wish.size, threads=4)
    )
    return [Case("gpu", "steps/s", value, limit, "torch's own Adam on the GPU")]


MEASURES: dict[str, Callable[[Wish], Lines]] = {
    "tcp": lambda wish: exchange("tcp", TCP, wish),
    "shared": lambda wish: exchange("shared", SHARED, wish),
    "small": small,
    "overlap": overlap,
    "mnist": mnist,
    "gpu": gpu,
}
"""The measures by name."""
