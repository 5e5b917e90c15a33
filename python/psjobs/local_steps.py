"""Local steps (`spec.training.local`): a trainer makes some steps alone, and then exchanges what they have changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from psjobs.job import Job
    from psjobs.parameters import Parameters


class LocalSteps:
    """Counts the steps of the script's optimizer, and exchanges after so many of them.

    In an elastic job `ends_here` says that the batch of the step under way is the last one of an exchange.
    """

    def __init__(self, job: Job, parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
        self._job, self._parameters = job, parameters
        self._steps = job._environment.steps_per_exchange
        self.made = 0
        """Steps since the last exchange."""
        self.ends_here: bool | None = None
        optimizer.register_step_post_hook(lambda *_: self._count())

    def _count(self) -> None:
        self.made += 1
        if self.made == self._steps if self.ends_here is None else self.ends_here:
            self.exchange()
        else:
            self._job._did_step()

    def exchange(self) -> None:
        """Gives the servers what the steps since the last exchange have changed, and takes their parameters."""
        self.made = 0
        self._parameters.put_differences()
        self._job._exchange(self._parameters)
        self._parameters.take()

    def begin(self) -> None:
        """Takes the servers' parameters, without the steps since the last exchange: others make these."""
        self.made = 0
        self._parameters.take()
