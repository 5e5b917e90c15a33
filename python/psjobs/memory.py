"""Where parameters and gradients lie while servers train a model: in the memory shared with them, or on a GPU beside it."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

PIECE = 2 << 20
"""Elements, 8 MiB, that are copied from a GPU at once: the servers get each piece while the next one is copied."""

Offer = Callable[[int], None]
"""Takes the place of an element; the gradients from there on are in the shared memory, and may leave."""


class Memory(Protocol):
    """All parameters and all gradients of a model, flat f32, where the model computes."""

    values: torch.Tensor
    gradients: torch.Tensor
    sent: torch.Tensor
    """All gradients of the last exchange, in the shared memory."""

    def send(self, first: int, offer: Offer) -> None:
        """Lets the gradients of the elements from `first` on leave; those of this step are final."""

    def finish(self, offer: Offer) -> None:
        """Returns when all gradients are in the shared memory. Those that are there first leave first."""

    def take(self) -> None:
        """Takes the parameters that are in the shared memory."""


class SharedMemory:
    """The memory that is shared with the servers: nothing is copied."""

    def __init__(self, values: torch.Tensor, gradients: torch.Tensor) -> None:
        self.values, self.gradients, self.sent = values, gradients, gradients

    def send(self, first: int, offer: Offer) -> None:
        """As in `Memory`: they are there."""
        offer(first)

    def finish(self, offer: Offer) -> None:
        """As in `Memory`: they are there."""

    def take(self) -> None:
        """As in `Memory`: the model computes with them."""


class CopiedMemory:
    """A copy of the memory that is shared with the servers: that may be in use by an exchange while the model computes."""

    def __init__(self, values: torch.Tensor, gradients: torch.Tensor) -> None:
        self._shared_values, self.sent = values, gradients
        self.values, self.gradients = values.clone(), torch.zeros_like(gradients)

    def send(self, first: int, offer: Offer) -> None:
        """As in `Memory`: they leave with the others."""

    def finish(self, offer: Offer) -> None:
        """As in `Memory`: copies them."""
        self.sent.copy_(self.gradients)

    def take(self) -> None:
        """As in `Memory`."""
        self.values.copy_(self._shared_values)


class DeviceMemory:
    """Memory of a GPU, copied to and from the shared memory, which is pinned for that.

    Gradients are copied on a stream of their own, while the GPU computes those of other layers. The host waits for the
    copies at the end of a step only, the last layers' first.
    """

    def __init__(self, values: torch.Tensor, gradients: torch.Tensor, device: torch.device) -> None:
        self._shared_values, self.sent = values, gradients
        self.values = torch.empty_like(values, device=device)
        self.gradients = torch.zeros_like(gradients, device=device)
        if device.type == "cuda":
            pin(device, values, gradients)
        self._device = device
        # torch.cuda; the tests take torch.cpu.
        self._streams = getattr(torch, device.type)
        self._copying = self._streams.Stream(device)
        # What is being copied: the first element of each piece, and its end as an event.
        self._under_way: deque[tuple[int, torch.Event]] = deque()
        # The gradients from this element on are copied, or being copied.
        self._copied = len(gradients)

    def send(self, first: int, offer: Offer) -> None:
        """As in `Memory`: begins to copy them, and offers what has been copied."""
        self._copy(first)
        while self._under_way and self._under_way[0][1].query():
            offer(self._under_way.popleft()[0])

    def finish(self, offer: Offer) -> None:
        """As in `Memory`."""
        self._copy(0)
        while self._under_way:
            first, end = self._under_way.popleft()
            end.synchronize()
            if first > 0:
                offer(first)
        self._copied = len(self.gradients)

    def take(self) -> None:
        """As in `Memory`: the copy is queued before whatever computes with them.

        The servers write to the shared memory when gradients of the next step are copied, which is behind this copy.
        """
        self.values.copy_(self._shared_values, non_blocking=True)

    def _copy(self, first: int) -> None:
        if first >= self._copied:
            return
        self._copying.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._copying):
            while first < self._copied:
                part = slice(max(first, self._copied - PIECE), self._copied)
                self.sent[part].copy_(self.gradients[part], non_blocking=True)
                end = self._streams.Event()
                end.record(self._copying)
                self._under_way.append((part.start, end))
                self._copied = part.start


def memory_for(
    values: torch.Tensor, gradients: torch.Tensor, tensors: list[torch.Tensor], is_copied: bool = False
) -> Memory:
    """The memory for a model of these tensors, given that which is shared with the servers: that of their device, if they
    are all on one GPU, else this one or, if `is_copied`, a copy."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) == 1 and is_apart(device := devices.pop()):
        return DeviceMemory(values, gradients, device)
    return CopiedMemory(values, gradients) if is_copied else SharedMemory(values, gradients)


def is_apart(device: torch.device) -> bool:
    """True if a device has memory of its own, and streams: a GPU by CUDA or ROCm. Tensors of others are copied one by
    one."""
    return device.type == "cuda"


def pin(device: torch.device, *tensors: torch.Tensor) -> bool:
    """Pins host memory for copies to and from a GPU, from the first to the last of these tensors, which lie one behind the
    other. False where the system refuses it, for instance because of a limit on locked memory: copies are slower then, and
    right."""
    begin = min(tensor.data_ptr() for tensor in tensors)
    end = max(tensor.data_ptr() + tensor.nbytes for tensor in tensors)
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(begin, end - begin, 0))
        if code == 0:
            return True
        try:
            # CUDA reports an error once more, at the next call, which is not to be the script's.
            torch.zeros(1, device=device).add_(1)
        except RuntimeError:
            pass
    warnings.warn(f"psjobs: CUDA error {code}: the memory for gradients and parameters is not pinned, so copies are slower", stacklevel=2)
    return False
