"""Local steps (`spec.training.local`): a trainer makes some steps alone, and then exchanges what they have changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from psjobs import _native

if TYPE_CHECKING:
    from psjobs.job import Job
    from psjobs.parameters import Parameters


class LocalSteps:
    """Counts the steps of the script's optimizer, and exchanges after so many of them.

    In an elastic job `ends_here` says that the batch of the step under way is the last one of an exchange.
    """

    def __init__(
        self, job: Job, parameters: Parameters, session: _native.Session, optimizer: torch.optim.Optimizer
    ) -> None:
        self._job, self._parameters, self._session = job, parameters, session
        self._steps, self._is_overlapped = job._environment.steps_per_exchange, job._environment.overlaps_exchanges
        self.made = 0
        """Steps since the last exchange."""
        self.ends_here: bool | None = None
        # The parameters without what the steps since the last exchange have changed.
        self._base = parameters.flat()
        # The parameters with which the exchange under way began.
        self._under_way: torch.Tensor | None = None
        optimizer.register_step_post_hook(lambda *_: self._count())

    def _count(self) -> None:
        self.made += 1
        if self.made == self._steps if self.ends_here is None else self.ends_here:
            self._exchange(is_last=False)
        else:
            self._job._did_step()

    def finish(self) -> None:
        """Makes the last exchange, and takes the parameters that come back."""
        if self.made > 0:
            self._exchange(is_last=True)
        elif self._end_exchange():
            self.begin()

    def settle(self) -> None:
        """Ends the exchange under way, if one is."""
        self._end_exchange()

    def begin(self) -> None:
        """Takes the servers' parameters, without what the steps since the last exchange have changed."""
        self._parameters.take()
        self._base, self._under_way, self.made = self._parameters.flat(), None, 0

    def _exchange(self, is_last: bool) -> None:
        """Gives the servers what the steps since the last exchange have changed."""
        if not self._end_exchange():
            return
        values = self._parameters.flat()
        torch.sub(self._base, values, out=self._parameters.memory.gradients)
        if self._is_overlapped and not is_last:
            number = self._job._step // self._steps
            self._job._begin_exchange(number, [], [])
            self._under_way, self._base, self.made = values, values, 0
            self._job._did_step()
        else:
            self._job._exchange(self._parameters)
            self.begin()

    def _end_exchange(self) -> bool:
        """Waits for the exchange under way, if one is, and adds to the parameters that come back what the steps since it
        began have changed. False if the servers went back to a checkpoint, from which the trainer goes on."""
        if self._under_way is None:
            return True
        sent, self._under_way = self._under_way, None
        ended = self._job._end_exchange(settles=False)
        if ended is None:
            return True
        following, has_gone_back = ended
        if has_gone_back:
            self._job._go_back_to(following)
            self.begin()
            return False
        values = self._parameters.flat()
        self._parameters.put(values + (self._parameters.memory.values - sent))
        self._base = self._parameters.flat() + (sent - values)
        return True
