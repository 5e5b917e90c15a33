"""The measurements of a case, each in a process of its own."""

from __future__ import annotations

import array
import itertools
import os
import pathlib
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

STEPS = 12
"""Steps that are measured, after some that warm up."""
WARM = 4
MB = 1_000_000
MNIST_STEPS = 300
EXAMPLES = 96
"""Examples of a batch whose backward takes some 100 ms of a CPU."""
MNIST_WARM = 20


@dataclass
class Size:
    """How much a part does."""

    steps: int | None = None
    """Steps that are measured; by default as many as the part thinks right."""
    examples: int = EXAMPLES
    """Examples of a batch of the model that overlaps backward and exchange."""


def _median(size: Size, step: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
    """Median seconds of a step; `prepare` runs before each and is not measured."""
    seconds = []
    for number in range(WARM + (size.steps or STEPS)):
        prepare()
        began = time.perf_counter()
        step()
        if number >= WARM:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _exchange(size: Size) -> float:
    import psjobs
    import torch

    model = torch.nn.ParameterList([torch.zeros(25 * MB // 8) for _ in range(8)])
    _, optimizer = psjobs.join().attach(model, overlap=False)

    def backward() -> None:
        sum((parameter * 1e-6).sum() for parameter in model).backward()

    # The gradients are there already when torch.distributed.rpc sends them.
    return 1 / _median(size, optimizer.step, backward)


def _session(size: Size) -> float:
    """The same bytes by the session alone, which is Rust's: without torch and its hooks."""
    from psjobs import _native

    session = _native.Session(
        _native.Environment.read(),
        [("weight", [25 * MB], 1.0, None)],
        memoryview(bytearray(100 * MB)).cast("f"),
        _native.Interrupt(),
    )
    gradients = memoryview(session.memory()[1]).cast("B")
    computed = memoryview(array.array("f", [1e-6]) * (25 * MB)).cast("B")
    numbers = itertools.count()

    def backward() -> None:
        # As backward() does: an exchange of gradients that nobody has written since the last one is faster.
        gradients[:] = computed

    return 1 / _median(size, lambda: session.exchange(next(numbers), [], []), backward)


def _rpc(size: Size) -> float:
    """The same bytes with torch.distributed.rpc between two processes, by its TCP transport."""
    # It warns that a connection was closed when a process leaves.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch
    import torch.distributed.rpc as rpc

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    ended, end = os.pipe()
    child = os.fork()
    rank = 1 if child else 0
    options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"])
    rpc.init_rpc(f"{rank}", rank=rank, world_size=2, rpc_backend_options=options)  # type: ignore[no-untyped-call]
    if not child:
        os.close(end)
        os.read(ended, 1)
        os._exit(0)
    gradient = torch.full((25 * MB,), 1e-6)

    def step() -> None:
        rpc.rpc_sync("0", torch.add, args=(gradient, 1e-6))

    try:
        found = 1 / _median(size, step)
        # With `graceful` both wait for each other by a store that the first to leave takes with it.
        rpc.shutdown(graceful=False)
    finally:
        os.close(end)
        os.waitpid(child, 0)
    return found


def _tensors() -> torch.nn.ParameterList:
    import torch

    return torch.nn.ParameterList([torch.zeros(64) for _ in range(1000)])


def _small(size: Size) -> float:
    import psjobs

    model = _tensors()
    job = psjobs.join()
    _, optimizer = job.attach(model)
    assert job._session is not None

    seconds = []
    for number in range(WARM + (size.steps or STEPS)):
        waited, began = job._session.waiting(), time.perf_counter()
        sum(parameter.sum() for parameter in model).backward()
        optimizer.step()
        spent = time.perf_counter() - began
        if number >= WARM:
            seconds.append(spent - (job._session.waiting() - waited))
    return 1 / statistics.median(seconds)


def _small_torch(size: Size) -> float:
    import torch

    model = _tensors()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        sum(parameter.sum() for parameter in model).backward()
        optimizer.step()

    return 1 / _median(size, step)


class _Layers:
    """Ten layers of 10 MB, and a batch."""

    def __init__(self, examples: int, device: str = "cpu") -> None:
        import torch

        torch.manual_seed(1)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(1600, 1600) for _ in range(10))).to(device)
        self.batch = torch.randn(examples, 1600, device=device)
        self.loss = torch.zeros(())

    def forward(self) -> None:
        """Computes the loss of the batch, with gradients of zero."""
        self.model.zero_grad(set_to_none=False)
        self.loss = self.model(self.batch).square().mean()

    def backward(self) -> None:
        """Computes all gradients."""
        self.forward()
        self.loss.backward()  # type: ignore[no-untyped-call]


def _overlap(size: Size) -> float:
    import psjobs

    layers = _Layers(size.examples)
    _, optimizer = psjobs.join().attach(layers.model)

    def step() -> None:
        layers.loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return _median(size, step, layers.forward)


def _exchange_layers(size: Size) -> float:
    import psjobs

    layers = _Layers(size.examples)
    _, optimizer = psjobs.join().attach(layers.model, overlap=False)
    return _median(size, optimizer.step, layers.backward)


GPU_EXAMPLES = 16384
"""Examples of a batch that keeps a GPU busy for some 50 ms."""


def _gpu_step(size: Size, layers: _Layers, optimizer: torch.optim.Optimizer) -> float:
    import torch

    def step() -> None:
        layers.model(layers.batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()

    return 1 / _median(size, step)


def _gpu(size: Size) -> float:
    import psjobs

    layers = _Layers(GPU_EXAMPLES, "cuda")
    _, optimizer = psjobs.join().attach(layers.model)
    return _gpu_step(size, layers, optimizer)


def _gpu_torch(size: Size) -> float:
    import torch

    layers = _Layers(GPU_EXAMPLES, "cuda")
    return _gpu_step(size, layers, torch.optim.Adam(layers.model.parameters(), lr=0.01))


def _backward(size: Size) -> float:
    layers = _Layers(size.examples)
    return _median(size, lambda: layers.loss.backward(), layers.forward)  # type: ignore[no-untyped-call]


def _network() -> torch.nn.Module:
    """The network of PyTorch's own MNIST example, without its dropout: 1.2 million parameters."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def mnist_folder() -> pathlib.Path:
    """The folder of MNIST's files."""
    return pathlib.Path(os.environ.get("PSJOB_DATA") or pathlib.Path.home() / ".cache/psjobs/mnist")


def _mnist(size: Size) -> float:
    import psjobs
    import torch

    steps = size.steps or MNIST_STEPS
    images, labels = (
        torch.frombuffer(bytearray((mnist_folder() / f"train-{name}-ubyte").read_bytes()), dtype=torch.uint8)
        for name in ("images-idx3", "labels-idx1")
    )
    examples = torch.utils.data.TensorDataset(images[16:].view(-1, 1, 28, 28).float() / 255, labels[8:].long())
    job = psjobs.join()
    model, optimizer = job.attach(_network())
    epochs = 1 + (MNIST_WARM + steps) * 32 * max(1, job.trainers) // len(examples)
    batches = itertools.islice(job.batches(examples, batch_size=32, epochs=epochs), MNIST_WARM + steps)
    began = 0.0
    for number, (x, y) in enumerate(batches):
        if number == MNIST_WARM:
            began = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return steps / (time.perf_counter() - began)


PARTS: dict[str, Callable[[Size], float]] = {
    "exchange": _exchange,
    "session": _session,
    "rpc": _rpc,
    "small": _small,
    "small-torch": _small_torch,
    "overlap": _overlap,
    "exchange-layers": _exchange_layers,
    "backward": _backward,
    "mnist": _mnist,
    "gpu": _gpu,
    "gpu-torch": _gpu_torch,
}
"""The parts by name."""
