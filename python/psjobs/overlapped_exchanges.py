"""Exchanges that overlap (`spec.training.consistency.overlap`): a trainer gives its gradient to the servers, and computes the
next one with the parameters that it has while they apply it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from psjobs import _native
    from psjobs.job import Job
    from psjobs.parameters import Parameters


class OverlappedExchanges:
    """Ends the exchange of each gradient when the next one is there.

    The model has memory of its own: what the servers send meanwhile is taken by `exchange` and `settle` alone.
    """

    def __init__(self, job: Job, parameters: Parameters, session: _native.Session) -> None:
        self._job, self._parameters, self._session = job, parameters, session

    def exchange(self) -> None:
        """Ends the exchange of the gradient before, and begins that of this one. The model has the parameters of the one
        that has ended then.

        If the servers went back to a checkpoint, this gradient is of before, and dropped.
        """
        job, parameters = self._job, self._parameters
        step = job._step
        rows, wanted, room = job._take_gradients(parameters)
        if self._end(settles=False):
            return
        # Behind the parameters: where their copy to a device is only queued, that of the gradients waits for it.
        parameters.memory.finish(lambda first: self._session.offer(step, first))
        have_come = job._begin_exchange(step, rows, room)
        job._fetched(wanted if have_come else [])
        job._did_step()

    def settle(self) -> None:
        """Ends the exchange under way, if one is: the model has its parameters then, or those of a checkpoint that the servers
        went back to."""
        self._end(settles=True)

    def _end(self, settles: bool) -> bool:
        """Waits for the exchange under way, and takes the parameters. True if the servers went back."""
        ended = self._job._end_exchange(settles)
        if ended is None:
            return False
        following, has_gone_back = ended
        self._parameters.take()
        if has_gone_back:
            self._job._fetched([])
            self._job._discard_rows()
            self._job._go_back_to(following)
        return has_gone_back
