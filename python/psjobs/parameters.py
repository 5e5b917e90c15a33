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
    """The script's gradient, and its version, when it was copied to `gradient`."""
    is_over: bool = False
    """True if `gradient` is that of a step that is over: the next one replaces it."""

    @property
    def is_view(self) -> bool:
        """True if the model computes with `values`, false if values and gradients are copied: those of another type than
        f32, and of a tensor that was given memory of its own, as an LSTM on a GPU does."""
        return self.tensor.data_ptr() == self.values.data_ptr()

    @property
    def has_gradient(self) -> bool:
        """True if backward() or the script has set a gradient in this step."""
        gradient = self.tensor.grad
        if gradient is None or not self.is_over:
            return gradient is not None
        return gradient is not self.gradient and (self.copied is None or gradient is not self.copied[0])

    def discard(self) -> None:
        """Forgets the gradient."""
        self.tensor.grad, self.copied, self.is_over = None, None, True

    def collect(self) -> bool:
        """Puts the script's gradient into `gradient`, zero if it has none. False if it is there already."""
        gradient = self.tensor.grad
        if gradient is None or not self.has_gradient:
            self.gradient.zero_()
            self.copied, self.is_over = None, False
            return True
        if gradient is self.gradient:
            return False
        version = gradient._version
        if self.copied is not None and self.copied[0] is gradient and self.copied[1] == version:
            return False
        self.gradient.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        self.copied, self.is_over = (gradient, version), False
        if self.is_view:
            # What backward() adds to it later is in place.
            self.tensor.grad, self.copied = self.gradient, None
        return True


class Parameters:
    """All trainable parameters of a model, in its own order."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.named = _trainable(model)
        # Not trained; the servers lack them.
        self._frozen = [(name, tensor) for name, tensor in model.named_parameters() if not tensor.requires_grad]
        self._recurrent = [module for module in model.modules() if isinstance(module, torch.nn.RNNBase)]
        self.all: list[Parameter] = []
        self.memory: Memory = SharedMemory(torch.empty(0), torch.empty(0))
        """Where the model computes."""
        # The halves of the shared memory, and where they lie.
        self._shared: list[tuple[torch.Tensor, int]] = []

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

    def place(self, session: Session, is_shared: bool = True, is_copied: bool = False) -> None:
        """Moves the parameters to the session's memory, or memory of their GPU; they take the session's values, and have no
        gradients. Where it is not shared, because the trainer makes steps alone, they keep memory of their own. Where it is
        copied, because exchanges overlap, they move to a copy of it."""
        values, gradients = (torch.frombuffer(half, dtype=torch.float32) for half in session.memory())
        gradients.zero_()
        self._shared = [(half, half.data_ptr()) for half in (values, gradients)]
        self.memory = SharedMemory(values, gradients)
        if is_shared:
            self.memory = memory_for(values, gradients, [tensor for _, tensor in self.named], is_copied)
        values, gradients = self.memory.values, self.memory.gradients
        start = 0
        for name, tensor in self.named:
            part = slice(start, start := start + tensor.numel())
            held, sent = values[part].view(tensor.shape), gradients[part].view(tensor.shape)
            tensor.grad = None
            if is_shared and _fits(tensor, values):
                tensor.data = held
            self.all.append(Parameter(name, tensor, held, sent))
        for module in self._recurrent:
            # cuDNN computes with weights in an order of its own, and would bring them into it in every forward().
            module.flatten_parameters()
        self.take()

    def collect(self) -> list[int]:
        """Puts the gradients into `memory`. Returns the places of those that were not there yet, ascending."""
        return [place for place, parameter in enumerate(self.all) if parameter.collect()]

    def check_frozen(self) -> None:
        """Raises InputError if a parameter requires a gradient that did not when the model was attached."""
        for name, tensor in self._frozen:
            if tensor.requires_grad:
                text = f"parameter {name} requires a gradient now, and did not when the model was attached, so no server trains it"
                raise InputError(f"{text}; attach the model when all that is to be trained requires a gradient")

    def check_memory(self) -> None:
        """Raises InputError if the tensors that the model and the servers share have been moved to other memory. One parameter
        that was given memory of its own is copied instead."""
        if all(half.data_ptr() == address for half, address in self._shared):
            return
        name = next((parameter.name for parameter in self.all if parameter.is_view), self.all[0].name)
        raise InputError(
            f"parameter {name} and those behind it no longer lie in the memory that the servers share; do not call "
            "share_memory() or give the model to another process after attach"
        )

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

    def begin_step(self) -> None:
        """Before backward() adds the first gradient of a step: forgets those of the step before.

        New ones are copied over them, by `collect`, which is less work than to set them to zero and to add.
        """
        for parameter in self.all:
            if parameter.is_over and not parameter.has_gradient:
                parameter.discard()

    def end_step(self) -> None:
        """The servers have all gradients, which can be read until the next backward()."""
        for parameter in self.all:
            parameter.is_over = True

    def discard(self) -> None:
        """Forgets all gradients."""
        for parameter in self.all:
            parameter.discard()

    def not_finite(self) -> str | None:
        """Name of the first parameter whose gradient has a NaN or an infinity, of those that were sent last."""
        parts = torch.split(self.memory.sent, [parameter.tensor.numel() for parameter in self.all])
        bad = (one.name for one, part in zip(self.all, parts, strict=True) if not bool(part.isfinite().all()))
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
