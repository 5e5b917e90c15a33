"""Measures where the time of a trainer's steps goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Part = Literal["data", "compute"]


class StepClock:
    """Adds up the seconds in which the script waits for its next batch, and those in which it computes with one.

    Forward and backward are one part: a script says where neither begins.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = self._since = now()
        self._part: Part | None = None
        self._seconds: dict[Part, float] = {"data": 0.0, "compute": 0.0}

    def enter(self, part: Part | None) -> Part | None:
        """What follows belongs to `part`, or to none. Returns the part that it ends."""
        now, ended = self._now(), self._part
        if ended is not None:
            self._seconds[ended] += now - self._since
        self._part, self._since = part, now
        return ended

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What is done inside belongs to no part; then the one before goes on."""
        part = self.enter(None)
        try:
            yield
        finally:
            self.enter(part)

    def spent(self) -> tuple[float, float, float]:
        """Seconds since the clock was made, those of data, and those of compute."""
        self.enter(self._part)
        return self._since - self._began, self._seconds["data"], self._seconds["compute"]
