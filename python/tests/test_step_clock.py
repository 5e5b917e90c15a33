"""Where the time of a trainer's steps goes, by a clock that the test sets."""

from typing import Any

from psjobs.batches import timed
from psjobs.step_clock import StepClock
from test_batches import trainer


class Watch:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time

    def tick(self, seconds: float) -> None:
        self.time += seconds


def test_each_part_has_its_own_time_without_that_in_which_others_are_waited_for() -> None:
    watch = Watch()
    clock = StepClock(watch)
    watch.tick(1)
    assert clock.enter("data") is None
    watch.tick(2)
    assert clock.enter("compute") == "data"
    watch.tick(4)
    with clock.apart():
        watch.tick(8)
    watch.tick(16)
    assert clock.enter(None) == "compute"
    watch.tick(32)
    assert clock.spent() == (63, 2, 20)


def test_a_batch_is_computed_from_when_it_comes_until_its_step_or_the_next_batch() -> None:
    watch = Watch()
    job: Any = trainer()
    job._clock = StepClock(watch)

    def read() -> Any:
        for number in range(3):
            watch.tick(1)
            yield number
        watch.tick(1)

    for number in timed(job, read()):
        watch.tick(10)
        # The first two batches belong to one step.
        if number > 0:
            job._did_step()
        watch.tick(100)
    assert job._clock.spent() == (334, 4, 130)


def test_a_script_that_leaves_the_loop_computes_no_more() -> None:
    watch = Watch()
    job: Any = trainer()
    job._clock = StepClock(watch)
    for _ in timed(job, iter(range(3))):
        watch.tick(10)
        break
    watch.tick(100)
    job._did_step()
    assert job._clock.spent() == (110, 0, 10)
