"""A model's parameters, in memory where the servers' values arrive and its gradients are sent from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from psjobs._native import InputError, Session
from psjobs.buffers import floats
from psjobs.memory import Memory, SharedMemory, memory_for


@dataclass
class Parameter:
    """One trainable parameter and its place among all."""

    name: str
    tensor: torch.nn.Parameter
    values: torch.Tensor
    """What the servers hold, f32, in the parameter's shape: a part of `Parameters.memory`."""
    gradient: torch.Tensor
    """What is sent to them, f32, in the parameter's shape: likewise."""
    copied: tuple[torch.Tensor, int] | None = None
    """The script's gradient, and its version, when it was copied to `gradient` in this step."""

    @property
    def is_view(self) -> bool:
        """True if the model computes with `values`, false if values and gradients are copied: those of another type than
        f32, and of a tensor that was given memory of its own, as an LSTM on a GPU does."""
        return self.tensor.data_ptr() == self.values.data_ptr()

    @property
    def has_gradient(self) -> bool:
        """True if the script has set a gradient, or one that is not zero is in the shared memory."""
        gradient = self.tensor.grad
        return gradient is not None and (gradient is not self.gradient or bool(gradient.any()))

    def collect(self) -> bool:
        """Puts the script's gradient into `gradient`. False if it is there already."""
        gradient = self.tensor.grad
        if gradient is self.gradient:
            return False
        if gradient is None:
            if self.copied is None and not self.is_view:
                return False
            self.gradient.zero_()
            return True
        version = gradient._version
        if self.copied is not None and self.copied[0] is gradient and self.copied[1] == version:
            return False
        self.gradient.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        self.copied = (gradient, version)
        return True


class Parameters:
    """All trainable parameters of a model, in its own order."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.named = _trainable(model)
        self._recurrent = [module for module in model.modules() if isinstance(module, torch.nn.RNNBase)]
        self.all: list[Parameter] = []
        self.memory: Memory = SharedMemory(torch.empty(0), torch.empty(0))
        """Where the model computes."""

    def shapes(self) -> list[tuple[str, list[int]]]:
        """Name and shape of each."""
        return [(name, list(tensor.shape)) for name, tensor in self.named]

    def flat(self) -> torch.Tensor:
        """A copy of the model's values, flat f32, on the CPU."""
        parts = [tensor.detach().to(torch.float32).reshape(-1) for _, tensor in self.named]
        if len({part.device for part in parts}) > 1:
            parts = [part.cpu() for part in parts]
        return torch.cat(parts).cpu()

    def initial(self) -> memoryview[float]:
        """A buffer with all values, flat f32."""
        return floats(self.flat())

    def put(self, flat: torch.Tensor) -> None:
        """Gives the model these values."""
        start = 0
        with torch.no_grad():
            for _, tensor in self.named:
                part = slice(start, start := start + tensor.numel())
                tensor.copy_(flat[part].view(tensor.shape))

    def place(self, session: Session, is_shared: bool = True) -> None:
        """Moves the parameters to the session's memory, or memory of their GPU; they take the session's values, and zero
        gradients. Where it is not shared, because the trainer makes steps alone, they keep memory of their own."""
        values, gradients = (torch.frombuffer(half, dtype=torch.float32) for half in session.memory())
        gradients.zero_()
        self.memory = SharedMemory(values, gradients)
        if is_shared:
            self.memory = memory_for(values, gradients, [tensor for _, tensor in self.named])
        values, gradients = self.memory.values, self.memory.gradients
        start = 0
        for name, tensor in self.named:
            part = slice(start, start := start + tensor.numel())
            held, sent = values[part].view(tensor.shape), gradients[part].view(tensor.shape)
            tensor.grad = None
            if is_shared and _fits(tensor, values):
                tensor.data, tensor.grad = held, sent
            self.all.append(Parameter(name, tensor, held, sent))
        for module in self._recurrent:
            # cuDNN computes with weights in an order of its own, and would bring them into it in every forward().
            module.flatten_parameters()
        self.take()

    def collect(self) -> int:
        """Puts the gradients into `memory`. Returns the place of the last one that was not there yet, or -1."""
        last = -1
        for place, parameter in enumerate(self.all):
            if parameter.collect():
                last = place
        return last

    def take(self) -> None:
        """Takes the values that the servers have sent."""
        self.memory.take()
        with torch.no_grad():
            for parameter in self.all:
                if not parameter.is_view:
                    parameter.tensor.copy_(parameter.values)

    def scale(self, factor: float) -> None:
        """Multiplies all gradients."""
        self.memory.gradients.mul_(factor)

    def zero(self) -> None:
        """Sets all gradients to zero."""
        self.memory.gradients.zero_()
        for parameter in self.all:
            parameter.tensor.grad = parameter.gradient if parameter.is_view else None
            parameter.copied = None

    def not_finite(self) -> str | None:
        """Name of the first parameter whose gradient has a NaN or an infinity."""
        bad = (parameter.name for parameter in self.all if not bool(parameter.gradient.isfinite().all()))
        return next(bad, None)


def _fits(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    """True if the model can compute with this memory. On a GPU a tensor keeps its order of elements, as channels_last."""
    is_in_order = memory.device.type == "cpu" or tensor.is_contiguous()
    return is_in_order and (tensor.dtype, tensor.device) == (memory.dtype, memory.device)


def _trainable(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The trainable parameters by name; one that is in two places of a model counts once.

    Raises InputError if there is none, or one that cannot be trained by servers.
    """
    named = [(name, tensor) for name, tensor in model.named_parameters() if tensor.requires_grad]
    if not named:
        raise InputError("the model has no parameters that require a gradient; give it at least one")
    places: dict[tuple[str, int, int], str] = {}
    for name, tensor in named:
        if isinstance(tensor, torch.nn.parameter.UninitializedParameter) or tensor.is_meta:
            raise InputError(f"parameter {name} has no values yet; run the model once, or initialize it, before attach")
        if not tensor.dtype.is_floating_point:
            raise InputError(f"parameter {name} is {tensor.dtype}; servers train real numbers, so freeze it")
        place = (str(tensor.device), tensor.data_ptr(), tensor.numel())
        other = places.setdefault(place, name)
        if other != name and tensor.numel() > 0:
            text = f"parameters {other} and {name} share memory, but are two; assign one Parameter to both modules"
            raise InputError(text)
    return named
