"""The batches of a trainer whose servers go back to a checkpoint: a stand-in takes the servers' place."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import psjobs
import pytest
import torch
from psjobs import _native
from psjobs.job import Job
from torch.utils.data import DataLoader, Dataset, IterableDataset

EXAMPLES = 12
STEPS = 4
"""Steps for one exchange of the elastic job."""


class Numbers(Dataset[int]):
    """Its examples are their numbers."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, number: int) -> int:
        return number


class Stream(IterableDataset[int]):
    """The same without a length."""

    def __iter__(self) -> Any:
        yield from range(EXAMPLES)


class Servers:
    """Answers as a session does. In an elastic job it deals exchanges."""

    def __init__(self) -> None:
        self.entry, self.has_left = 0, False
        self.enter()

    def enter(self) -> None:
        self.entry, self.dealt = self.entry + 1, deque(range(EXAMPLES // STEPS))

    def entries(self) -> int:
        return self.entry

    def next_step(self) -> int:
        return 0

    def next_batch(self, _: int) -> int | None:
        return self.dealt.popleft() if self.dealt else None

    def waiting(self) -> float:
        return 0.0

    def finish(self) -> int:
        return EXAMPLES

    def leave(self, *_: object) -> None:
        self.has_left = True


def trainer(elastic: bool = False, resume: int = 0) -> Job:
    """The one trainer of a job, whose servers have its first `resume` steps."""
    environment: Any = SimpleNamespace(
        name=None, elastic=elastic, adaptive=False, batch_size=1, seed=3, trainer=0, trainers=1, result_file=None
    )
    environment.steps_per_exchange = STEPS if elastic else 1
    job = Job(environment)
    job._session = Servers()  # type: ignore[assignment]
    job._step = job._resume = resume
    return job


def settle(job: Job, following: int) -> None:
    """Lets the servers go back to step `following` when the exchange under way ends."""
    job._exchanges = SimpleNamespace(settle=lambda: job._go_back_to(following))  # type: ignore[assignment]


def order(epochs: int = 1) -> list[int]:
    """The examples in the order in which one trainer reads them."""
    sampler = _native.Sampler(EXAMPLES, 1, 1, 0, 3)
    return [row for step in range(epochs * EXAMPLES) for row in sampler.batch(step)]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exchange_that_is_dealt_to_others_is_not_read_although_its_first_batches_were_ahead(workers: int) -> None:
    job = trainer(elastic=True)
    read: list[int] = []
    for batch in job.batches(Numbers(), num_workers=workers):
        read += batch.tolist()
        # With a worker the loader has two batches of the next exchange by now.
        if len(read) == STEPS:
            job._session.enter()  # type: ignore[union-attr]
    assert read == order()[:STEPS] + order()


@pytest.mark.parametrize("epochs", [1, 2])
def test_after_the_last_batch_of_data_without_a_length_no_exchange_is_under_way(epochs: int) -> None:
    job = trainer()
    settled: list[int] = []
    job._exchanges = SimpleNamespace(settle=lambda: settled.append(job._step))  # type: ignore[assignment]
    for _ in job.batches(Stream(), epochs=epochs):
        job._did_step()
    assert settled == [epochs * EXAMPLES]


# The steps that were made when the servers went back, and the one that they went back to.
REWINDS = [(5, 3), (EXAMPLES, 10), (EXAMPLES + 5, 10), (2 * EXAMPLES, 2 * EXAMPLES - 1)]


@pytest.mark.parametrize(("made", "following"), REWINDS)
def test_data_without_a_length_are_read_again_by_another_process(made: int, following: int) -> None:
    first, read = trainer(), []
    with pytest.raises(psjobs.PeerAway, match=f"went back to step {following}, "):
        for batch in first.batches(Stream(), epochs=2):
            read += batch.tolist()
            first._did_step()
            if len(read) == made:
                first._go_back_to(following)
    assert len(read) == made
    rest = [number for batch in trainer(resume=first.step).batches(Stream(), epochs=2) for number in batch.tolist()]
    assert read[:following] + rest == [*range(EXAMPLES), *range(EXAMPLES)]


@pytest.mark.parametrize("following", [EXAMPLES, EXAMPLES - 1])
def test_an_exchange_that_ends_behind_the_last_batch_loses_steps_only_if_they_are_undone(following: int) -> None:
    job = trainer()
    settle(job, following)
    batches = job.batches(Stream())
    for _ in range(EXAMPLES):
        next(batches)
        job._did_step()
    with pytest.raises(StopIteration if following == EXAMPLES else psjobs.PeerAway):
        next(batches)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("made", "following"), REWINDS)
def test_a_loader_of_the_scripts_own_is_begun_again_by_another_process(made: int, following: int, workers: int) -> None:
    def train(job: Job, read: list[int]) -> None:
        loader = DataLoader(Numbers(), 1, sampler=job.sampler(Numbers(), 1), num_workers=workers)
        for _ in range(2):
            for batch in loader:
                read += batch.tolist()
                job._did_step()
                if job is first and len(read) == made:
                    job._go_back_to(following)
        job.leave()

    first, before, rest = trainer(), list[int](), list[int]()
    with pytest.raises(psjobs.PeerAway, match=f"went back to step {following}, "):
        train(first, before)
    # What the loader had read ahead came out; no epoch was begun behind it.
    assert made <= len(before) <= made + 2
    second = trainer(resume=first.step)
    second._session.finish = lambda: second.step  # type: ignore[method-assign,union-attr]
    train(second, rest)
    assert before[:following] + rest == order(epochs=2)


@pytest.mark.parametrize("following", [EXAMPLES, EXAMPLES - 1])
def test_a_trainer_leaves_if_the_servers_went_back_and_have_all_its_steps(following: int) -> None:
    job = trainer(resume=EXAMPLES)
    servers: Any = job._session
    settle(job, following)
    if following == EXAMPLES:
        job.leave()
    else:
        with pytest.raises(psjobs.PeerAway, match=f"went back to step {following}, "):
            job.leave()
    assert servers.has_left == (following == EXAMPLES)


def test_the_gradient_that_is_not_finite_is_one_that_was_sent() -> None:
    from psjobs.memory import CopiedMemory
    from psjobs.parameters import Parameter, Parameters

    model = torch.nn.Linear(2, 3)
    parameters, sent = Parameters(model), torch.zeros(9)
    parameters.memory = CopiedMemory(torch.zeros(9), sent)
    held = torch.zeros(3, 2), torch.zeros(3)
    parameters.all = [Parameter(name, tensor, value, value) for (name, tensor), value in zip(parameters.named, held)]
    assert parameters.not_finite() is None
    sent[8] = torch.inf
    assert parameters.not_finite() == "bias"
    sent[5] = torch.nan
    assert parameters.not_finite() == "weight"
