"""Measures this package on this machine: `python -m psjobs.bench [CASE ...] [--json] [--runs N]`.

Each case prints a value, a limit that is measured in the same run, and their ratio. Value and limit are medians over the
runs, which alternate. Servers run on this machine; nothing else should.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

STEPS = 12
"""Steps that a run measures, after some that warm up."""
WARM = 4
MB = 1_000_000


@dataclass
class Case:
    """One row of the result."""

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


def main() -> None:
    """Runs the cases that the command line names, by default all."""
    parser = argparse.ArgumentParser(prog="python -m psjobs.bench", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; by default all")
    parser.add_argument("--json", action="store_true", help="print one object a line")
    parser.add_argument("--runs", type=int, default=5, help="how often value and limit are measured (default: 5)")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(PARTS[options.part]()))
        return
    unknown = set(options.cases) - CASES.keys()
    if unknown:
        parser.error(f"there is no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    for name in options.cases or CASES:
        if name == "gpu" and not _has_gpu():
            print("bench: this machine has no CUDA device, so gpu was not measured", file=sys.stderr)
            continue
        case = CASES[name](options.runs)
        if options.json:
            print(json.dumps({"bench": "python", **asdict(case), "ratio": case.ratio}), flush=True)
        else:
            print(f"{case.case:>10}  {case.value:9.3f} {case.unit}, {case.ratio:6.3f} of {case.of} ({case.limit:.3f})", flush=True)


def alternate(runs: int, *measures: Callable[[], float]) -> list[float]:
    """The medians of measures that alternate."""
    found = [[measure() for measure in measures] for _ in range(runs)]
    return [statistics.median(values) for values in zip(*found, strict=True)]


def part(name: str, server: tuple[str, ...] | None = None, threads: int = 1, **variables: str) -> float:
    """What a part of a case measures in a process of its own, as the one trainer of a server with these flags, if any."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PSJOB_")}
    environment = {**inherited, "OMP_NUM_THREADS": str(threads), **variables}
    command = [sys.executable, "-m", "psjobs.bench", "--part", name]
    if server is None:
        return float(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    worker = os.environ.get("PSJOBS_WORKER")
    start = [worker] if worker else [sys.executable, "-c", "from psjobs.__main__ import worker; worker()"]
    flags = ["serve", "--world-size", "2", "--rank", "0", "--master-port", str(port), *server]
    environment |= {
        "PSJOB_NAME": "bench",
        "PSJOB_NAMESPACE": "default",
        "PSJOB_UID": "manual",
        "PSJOB_ROLE": "trainer",
        "PSJOB_INDEX": "0",
        "PSJOB_SERVERS": f"127.0.0.1:{port}",
        "PSJOB_TRAINERS": "1",
        "PSJOB_TRAINING": json.dumps({"consistency": {"mode": "Sync"}}),
        "RUST_LOG": "warn",
    }
    with subprocess.Popen([*start, *flags], env={**inherited, "RUST_LOG": "warn"}) as serving:
        try:
            return float(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
        finally:
            serving.terminate()


TCP = ("--consistency", "sync", "--no-shared-memory")
SHARED = ("--consistency", "sync")


def exchange(runs: int, server: tuple[str, ...], case: str) -> Case:
    """Steps/s of 100 MB from Python."""
    value, limit = alternate(runs, lambda: part("exchange", server), lambda: part("rpc"))
    return Case(case, "steps/s", value, limit, "torch.distributed.rpc's over TCP")


def small(runs: int) -> Case:
    """Seconds of 1,000 small tensors: `step` alone, without the time that it waits for the server."""
    value, limit = alternate(runs, lambda: part("small", SHARED), lambda: part("small-torch"))
    return Case("small", "steps/s", value, limit, "torch's own Adam")


def overlap(runs: int) -> Case:
    """Step time of a model whose backward takes as long as its exchange, over the longer of the two."""
    together, backward, alone = alternate(
        runs, lambda: part("overlap", TCP), lambda: part("backward"), lambda: part("exchange-layers", TCP)
    )
    return Case("overlap", "s", together, max(backward, alone), "the longer of backward and exchange")


def gpu(runs: int) -> Case:
    """Steps/s of a model on a GPU whose parameters a server has, over torch's own optimizer there."""
    value, limit = alternate(runs, lambda: part("gpu", (*SHARED, "--optimizer", "adam"), threads=4), lambda: part("gpu-torch", threads=4))
    return Case("gpu", "steps/s", value, limit, "torch's own Adam on the GPU")


CASES: dict[str, Callable[[int], Case]] = {
    "tcp": lambda runs: exchange(runs, TCP, "tcp"),
    "shared": lambda runs: exchange(runs, SHARED, "shared"),
    "small": small,
    "overlap": overlap,
    "gpu": gpu,
}


def _median(step: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
    """Median seconds of a step; `prepare` runs before each and is not measured."""
    seconds = []
    for number in range(WARM + STEPS):
        prepare()
        began = time.perf_counter()
        step()
        if number >= WARM:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _exchange() -> float:
    import psjobs
    import torch

    model = torch.nn.ParameterList([torch.zeros(25 * MB // 8) for _ in range(8)])
    _, optimizer = psjobs.join().attach(model, overlap=False)

    def backward() -> None:
        sum((parameter * 1e-6).sum() for parameter in model).backward()

    # The gradients are there already when torch.distributed.rpc sends them.
    return 1 / _median(optimizer.step, backward)


def _rpc() -> float:
    """The same bytes with torch.distributed.rpc between two processes, by its TCP transport."""
    import torch
    import torch.distributed.rpc as rpc

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    child = os.fork()
    rank = 1 if child else 0
    options = rpc.TensorPipeRpcBackendOptions(_transports=["uv"], _channels=["basic"])
    rpc.init_rpc(f"{rank}", rank=rank, world_size=2, rpc_backend_options=options)  # type: ignore[no-untyped-call]
    found = 0.0
    if child:
        gradient = torch.full((25 * MB,), 1e-6)

        def step() -> None:
            rpc.rpc_sync("0", torch.add, args=(gradient, 1e-6))

        found = 1 / _median(step)
    rpc.shutdown()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return found


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _tensors() -> torch.nn.ParameterList:
    import torch

    return torch.nn.ParameterList([torch.zeros(64) for _ in range(1000)])


def _small() -> float:
    import psjobs

    model = _tensors()
    job = psjobs.join()
    _, optimizer = job.attach(model)
    assert job._session is not None

    def step() -> None:
        sum(parameter.sum() for parameter in model).backward()
        optimizer.step()

    before = job._session.waiting()
    each = _median(step)
    return 1 / (each - (job._session.waiting() - before) / (WARM + STEPS))


def _small_torch() -> float:
    import torch

    model = _tensors()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        sum(parameter.sum() for parameter in model).backward()
        optimizer.step()

    return 1 / _median(step)


class _Layers:
    """Ten layers of 10 MB, and a batch whose backward takes some 100 ms of a CPU."""

    def __init__(self, examples: int = 96, device: str = "cpu") -> None:
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


def _overlap() -> float:
    import psjobs

    layers = _Layers()
    _, optimizer = psjobs.join().attach(layers.model)

    def step() -> None:
        layers.loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return _median(step, layers.forward)


def _exchange_layers() -> float:
    import psjobs

    layers = _Layers()
    _, optimizer = psjobs.join().attach(layers.model, overlap=False)
    return _median(optimizer.step, layers.backward)


GPU_EXAMPLES = 16384
"""Examples of a batch that keeps a GPU busy for some 50 ms."""


def _gpu_step(layers: _Layers, optimizer: torch.optim.Optimizer) -> float:
    import torch

    def step() -> None:
        layers.model(layers.batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()

    return 1 / _median(step)


def _gpu() -> float:
    import psjobs

    layers = _Layers(GPU_EXAMPLES, "cuda")
    _, optimizer = psjobs.join().attach(layers.model)
    return _gpu_step(layers, optimizer)


def _gpu_torch() -> float:
    import torch

    layers = _Layers(GPU_EXAMPLES, "cuda")
    return _gpu_step(layers, torch.optim.Adam(layers.model.parameters(), lr=0.01))


def _backward() -> float:
    layers = _Layers()
    return _median(lambda: layers.loss.backward(), layers.forward)  # type: ignore[no-untyped-call]


PARTS: dict[str, Callable[[], float]] = {
    "exchange": _exchange,
    "rpc": _rpc,
    "small": _small,
    "small-torch": _small_torch,
    "overlap": _overlap,
    "exchange-layers": _exchange_layers,
    "backward": _backward,
    "gpu": _gpu,
    "gpu-torch": _gpu_torch,
}

if __name__ == "__main__":
    main()
