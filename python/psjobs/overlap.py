"""Gradients that leave for the servers while backward() still computes those of the layers before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from psjobs._native import InputError

if TYPE_CHECKING:
    from psjobs.memory import Offer
    from psjobs.parameters import Parameters

WATCHED_STEPS = 2
"""Steps that are only watched: how often each gradient grows in one, and whether something changes it afterwards."""


class Overlap:
    """Counts what backward() adds to each gradient, and offers gradients to the servers as soon as they are final.

    A gradient is final when backward() has added to it as often as in each of the first steps, which are watched: more
    than once where gradients of several batches add up. A script that changes gradients after backward(), as by clipping,
    or whose first steps differ, gets no overlap, and neither does a model on several devices. Gradients leave from the model's last
    parameter to its first, so a model that lists its layers in the order in which it computes them overlaps best.
    """

    def __init__(
        self, parameters: Parameters, block_elements: int, offer: Offer, is_wanted: bool = True
    ) -> None:
        self._parameters, self._offer, self._block_elements = parameters, offer, block_elements
        self._all, self._gradients = parameters.all, parameters.memory.gradients
        self._starts = [0]
        for parameter in self._all:
            self._starts.append(self._starts[-1] + parameter.tensor.numel())
        device = self._gradients.device
        self._is_possible = is_wanted and all(parameter.tensor.device == device for parameter in self._all)
        self._expected: list[int] = []
        self._steps = 0
        # The gradients of a step that is watched, as backward() left them.
        self._seen = torch.zeros_like(self._gradients) if self._is_possible else self._gradients
        self.begin_step()
        for index, parameter in enumerate(self._all):
            parameter.tensor.register_hook(self._begin)  # type: ignore[no-untyped-call]
            parameter.tensor.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]

    @property
    def counts(self) -> list[int]:
        """How often backward() has added to each gradient in this step."""
        return self._counts

    @property
    def has_left(self) -> bool:
        """True if gradients of this step are with the servers already."""
        return self._offered is not None

    def begin_step(self) -> None:
        """The gradients that are there are over."""
        self._counts = [0] * len(self._all)
        self._next = len(self._all) - 1
        self._offered: int | None = None
        self._version = 0
        self._is_begun = False

    def discard(self) -> None:
        """The script discards gradients without a step.

        Raises InputError if some have left.
        """
        if self.has_left:
            raise _too_late("opt.zero_grad() discards a gradient")
        self.begin_step()

    def end_step(self) -> None:
        """Puts all gradients of the step where they are sent from.

        Raises InputError if one was changed that has left.
        """
        version = self._gradients._version
        moved = self._parameters.collect()
        if self.has_left and (version != self._version or (moved and moved[-1] > self._next)):
            raise _too_late("the script has changed a gradient")
        if self._steps < WATCHED_STEPS and self._is_possible:
            # Clipping writes also where it leaves the values as they are.
            self._learn(version != self._version or any(self._counts[place] for place in moved))
        self._steps += 1

    def _learn(self, is_written: bool) -> None:
        """Compares a step that was watched with the one before, and its gradients with those that backward() left."""
        is_alike = self._steps == 0 or self._expected == self._counts
        self._is_possible = is_alike and not is_written and torch.equal(self._seen, self._gradients)
        self._expected = list(self._counts)
        self._seen.zero_()
        if not self._is_possible or self._steps + 1 == WATCHED_STEPS:
            self._seen = self._gradients

    def _begin(self, _: torch.Tensor) -> None:
        """A hook before backward() adds to a gradient."""
        if not self._is_begun:
            self._is_begun = True
            self._parameters.begin_step()

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        parameter, part = self._all[index], slice(self._starts[index], self._starts[index + 1])

        def grown(_: torch.Tensor) -> None:
            self._counts[index] += 1
            is_watched = self._steps < WATCHED_STEPS
            is_due = self._is_possible and (is_watched or self._counts[index] >= self._expected[index])
            if is_due or parameter.is_view:
                parameter.collect()
            if not self._is_possible:
                return
            if is_watched:
                self._seen[part] = self._gradients[part]
                self._version = self._gradients._version
            else:
                self._advance(index)

        return grown

    def _advance(self, index: int) -> None:
        """Offers what is final, a whole number of blocks, from the last parameter on."""
        if index > self._next:
            raise _too_late(f"backward() adds to the gradient of {self._all[index].name}")
        while self._next >= 0 and 0 < self._expected[self._next] <= self._counts[self._next]:
            self._next -= 1
        self._version = self._gradients._version
        first = self._starts[self._next + 1]
        blocks = -(-first // self._block_elements)
        if blocks * self._block_elements < self._starts[-1] and blocks != self._offered:
            self._offered = blocks
            self._parameters.memory.send(first, self._offer)


def _too_late(what: str) -> InputError:
    return InputError(
        f"{what} that had left for the servers already; call job.attach(..., overlap=False), which lets gradients leave in "
        "opt.step() only"
    )
