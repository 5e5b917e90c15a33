"""The batches of one trainer: read by torch's DataLoader, shared out as the trainers of every language share them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from itertools import chain, islice, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

from psjobs import _native
from psjobs._native import InputError

if TYPE_CHECKING:
    from psjobs.job import Job
    from psjobs.sparse import SparseModule

    Keys = Callable[[Any], Mapping[SparseModule, torch.Tensor]]

MEANWHILE = 4
"""Steps for which a share is kept when server 0 does not answer."""


class _Assignment:
    """A batch that was handed to the loader."""

    def __init__(
        self, rows: list[int], entry: int = 0, scale: float = 1.0, ends_exchange: bool | None = None
    ) -> None:
        self.rows, self.entry, self.scale, self.ends_exchange = rows, entry, scale, ends_exchange


class _Ahead(Sampler[list[int]]):
    """Hands batches to a DataLoader, which may read ahead, and remembers them until they come out."""

    def __init__(self, assignments: Iterator[_Assignment]) -> None:
        self._assignments = assignments
        self.read: deque[_Assignment] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        for assignment in self._assignments:
            self.read.append(assignment)
            yield assignment.rows


class _WholeSteps:
    """An order of batches whose epochs have whole steps of `accumulate` batches: those left over are left out.

    A script makes no step of them, or a smaller one; then the number of steps would not say which batch is next. A script that
    is alone is never started again, and has them.
    """

    def __init__(self, job: Job, sampler: _native.Sampler, accumulate: int) -> None:
        self._sampler, there = sampler, sampler.steps_per_epoch
        self.steps_per_epoch = there if job.alone else there // accumulate * accumulate
        if not self.steps_per_epoch:
            text = f"an epoch has {there} batches for each trainer, too few for a step of {accumulate}"
            raise InputError(f"{text}; make the batches or accumulate smaller")

    def batch(self, number: int) -> list[int]:
        return self._sampler.batch(self._number(number))

    def part(self, number: int, offset: int, examples: int) -> list[int]:
        return self._sampler.part(self._number(number), offset, examples)

    def _number(self, place: int) -> int:
        epoch, nth = divmod(place, self.steps_per_epoch)
        return epoch * self._sampler.steps_per_epoch + nth


def batches(
    job: Job,
    dataset: Sized | Iterable[Any],
    batch_size: int | None,
    epochs: int,
    accumulate: int,
    loader: dict[str, Any],
    keys: Keys | None,
    whole: bool = False,
) -> Iterator[Any]:
    """See `Job.batches`; `whole` epochs have whole steps."""
    size = job._environment.batch_size if batch_size is None else batch_size
    if size < 1 or epochs < 1 or accumulate < 1:
        raise InputError(f"batch_size {size}, epochs {epochs} and accumulate {accumulate} are numbers from 1")
    if accumulate > 1 and (job._environment.elastic or job._environment.adaptive):
        raise InputError("a step has one batch in a job that is elastic or has an adaptive batch; leave accumulate out")
    if not isinstance(dataset, Sized) or isinstance(dataset, IterableDataset):
        return _streamed(job, dataset, size, epochs, accumulate, loader, keys)
    if job._environment.elastic:
        if keys is not None:
            raise InputError("an elastic job has no sparse modules, for whose rows keys= is; leave it out")
        return _dealt(job, dataset, size, epochs, loader)
    sampler = _sampler(job, dataset, size)
    order = _WholeSteps(job, sampler, accumulate) if whole else sampler
    return _planned(job, dataset, order, size, epochs, accumulate, loader, keys)


def timed(job: Job, batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches. The job's clock gets to know when the script waits for one, and when it computes with one."""
    job._clock.enter("data")
    try:
        for batch in batches:
            job._clock.enter("compute")
            yield batch
            job._clock.enter("data")
    finally:
        job._clock.enter(None)


def _planned(
    job: Job,
    dataset: Sized,
    sampler: _native.Sampler | _WholeSteps,
    size: int,
    epochs: int,
    accumulate: int,
    loader: dict[str, Any],
    keys: Keys | None,
) -> Iterator[Any]:
    """Batches that follow from the step alone."""
    begin = job._planned
    end = job._planned = begin + epochs * sampler.steps_per_epoch
    place = max(begin, job._resume * accumulate)
    while True:
        rewinds = job._rewinds
        ahead = _Ahead(_shared(job, sampler, size, place, end) if job._environment.adaptive else _even(sampler, place, end))
        for batch in _with_rows(job, _loader(dataset, ahead, loader), keys):
            job._check_stop()
            yield _count(job, ahead.read.popleft(), batch)
            place += 1
            if job._rewinds != rewinds:
                place = job._resume * accumulate
                break
        else:
            job._settle()
            if job._rewinds == rewinds:
                return
            place = job._resume * accumulate


def _even(sampler: _native.Sampler | _WholeSteps, place: int, end: int) -> Iterator[_Assignment]:
    for number in range(place, end):
        yield _Assignment(sampler.batch(number))


def _shared(
    job: Job, sampler: _native.Sampler | _WholeSteps, size: int, place: int, end: int
) -> Iterator[_Assignment]:
    """Batches whose sizes follow the trainers' speed, as server 0 sets them."""
    offset, examples, until = job.trainer * size, size, place
    for number in range(place, end):
        if number >= until and job._session is not None:
            busy = time.monotonic() - job._began - job._session.waiting()
            share = job._session.share(number, size, job._examples, max(busy, 0.0))
            until, offset, examples = share or (number + MEANWHILE, offset, examples)
        # Servers take the mean of the trainers' gradients, and that is to be the mean of all examples.
        yield _Assignment(sampler.part(number, offset, examples), scale=examples / size)


def _dealt(job: Job, dataset: Sized, size: int, epochs: int, loader: dict[str, Any]) -> Iterator[Any]:
    """Batches that server 0 assigns to the trainers of an elastic job, one by one."""
    session = job._session
    if session is None:
        raise InputError("attach the model before the batches are read: an elastic job assigns them to its members")
    if job._planned:
        raise InputError("an elastic job has all its epochs in one call of batches; give it epochs=")
    sampler = _sampler(job, dataset, size)
    total = job._planned = epochs * sampler.steps_per_epoch
    # What is dealt are the batches of one exchange.
    together = job._environment.steps_per_exchange

    def assigned() -> Iterator[_Assignment]:
        while (unit := _next_batch(job, session, -(-total // together))) is not None:
            # Of the whole exchange: a loader that reads ahead asks for some of its batches when the servers have gone back.
            entry = session.entries()
            numbers = range(unit * together, min((unit + 1) * together, total))
            for number in numbers:
                yield _Assignment(sampler.batch(number), entry, ends_exchange=number == numbers[-1])

    read = 1
    while read:
        read = 0
        ahead = _Ahead(assigned())
        for batch in _loader(dataset, ahead, loader):
            read += 1
            job._check_stop()
            assignment = ahead.read.popleft()
            # What was assigned before this trainer entered anew is others' to read.
            if assignment.entry == session.entries():
                made = job._local_steps.made if job._local_steps else 0
                job._step = session.next_step() * together + made
                yield _count(job, assignment, batch)
    job._settle()


def _next_batch(job: Job, session: _native.Session, total: int) -> int | None:
    entries = session.entries()
    try:
        with job._clock.apart():
            number = session.next_batch(total)
    except _native.Interrupted:
        job._stop()
    if session.entries() != entries and job._local_steps is not None:
        job._local_steps.begin()
    elif session.entries() != entries and job._parameters is not None:
        job._parameters.take()
    return number


class _Part(IterableDataset[Any]):
    """This trainer's examples of a stream: of each `trainers * size` in a row `size` are its own. Of its batches the first
    `skip` are left out."""

    def __init__(self, stream: Iterable[Any], size: int, trainers: int, trainer: int, skip: int) -> None:
        self._stream, self._size, self._round, self._trainer, self._skip = stream, size, trainers * size, trainer, skip
        self.batches = 0

    def __iter__(self) -> Iterator[Any]:
        stream = iter(self._stream)
        while len(examples := list(islice(stream, self._round))) == self._round:
            self.batches += 1
            if self.batches > self._skip:
                yield from examples[self._trainer * self._size :][: self._size]


def _streamed(
    job: Job,
    stream: Iterable[Any],
    size: int,
    epochs: int,
    accumulate: int,
    loader: dict[str, Any],
    keys: Keys | None,
) -> Iterator[Any]:
    """Batches of data that have no length: each pass reads all of it, and leaves others' examples out."""
    if job._environment.elastic or job._environment.adaptive:
        text = "server 0 cannot deal out a data set without a length; give it one, or make the job neither elastic nor adaptive"
        raise InputError(text)
    if loader.get("num_workers"):
        raise InputError("a data set without a length is read by one process: leave num_workers out, or give it a length")
    assignment = _Assignment(list(range(size)))
    rewinds = job._rewinds
    for _ in range(epochs):
        # A process that was started again reads what the one before it had read, and leaves it out.
        part = _Part(stream, size, job.trainers, job.trainer, max(0, job._resume * accumulate - job._planned))
        for batch in _with_rows(job, DataLoader(part, batch_size=size, **loader), keys):
            job._check_stop()
            yield _count(job, assignment, batch)
            # Only a process that is started again reads from the beginning once more.
            if job._rewinds != rewinds:
                job._lost_steps(job._step)
        job._planned += part.batches
    step = job._step
    job._settle()
    if job._step < step:
        job._lost_steps(job._step)


class SharedLoader:
    """See `Job.share`."""

    def __init__(self, job: Job, loader: DataLoader[Any], accumulate: int, keys: Keys | None) -> None:
        if loader.batch_size is None:
            raise InputError("the loader has no batch_size, as one with a batch_sampler of its own; use batches() instead")
        _refuse_elastic(job)
        self._job, self._accumulate, self._keys = job, accumulate, keys
        self.dataset: Any = _selected(loader)
        self.batch_size = loader.batch_size
        taken = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator")
        self._loader = {name: getattr(loader, name) for name in taken}
        if loader.num_workers > 0:
            self._loader["prefetch_factor"] = loader.prefetch_factor

    def __iter__(self) -> Iterator[Any]:
        loader = dict(self._loader)
        epoch = batches(self._job, self.dataset, self.batch_size, 1, self._accumulate, loader, self._keys, whole=True)
        return timed(self._job, epoch)

    def __len__(self) -> int:
        if isinstance(self.dataset, IterableDataset):
            raise TypeError("a loader of a data set without a length has none")
        return _WholeSteps(self._job, _sampler(self._job, self.dataset, self.batch_size), self._accumulate).steps_per_epoch


def _refuse_elastic(job: Job) -> None:
    """Raises InputError in an elastic job, for what has an epoch in each iteration."""
    if job._environment.elastic:
        raise InputError("in an elastic job only batches(), one call for all epochs, follows trainers that come and go; use it instead")


def _selected(loader: DataLoader[Any]) -> Any:
    """The examples of a loader's data set that its sampler gives.

    Raises InputError for a sampler that gives some more often than others.
    """
    sampler: Any = loader.sampler
    if isinstance(sampler, SubsetRandomSampler):
        return Subset(loader.dataset, list(sampler.indices))
    is_partial = isinstance(sampler, RandomSampler) and (
        sampler.replacement or sampler.num_samples != len(sampler.data_source)
    )
    gives_all = isinstance(sampler, SequentialSampler | RandomSampler | DistributedSampler) and not is_partial
    if gives_all or isinstance(loader.dataset, IterableDataset):
        return loader.dataset
    text = f"the loader has a {type(sampler).__name__}, and the job's order takes its place, which gives each example once an epoch"
    raise InputError(f"{text}; select examples with torch.utils.data.Subset, and leave the sampler out")


def _sampler(job: Job, dataset: Sized, size: int) -> _native.Sampler:
    if not hasattr(dataset, "__len__"):
        raise InputError("the data set has no length, so trainers cannot share it out; give it one, or split it yourself")
    # Batches that are dealt one by one are those that one trainer alone would read.
    trainers, trainer = (1, 0) if job._environment.elastic else (job.trainers, job.trainer)
    return _native.Sampler(len(dataset), size, trainers, trainer, job._environment.seed)


def _loader(dataset: Sized, ahead: _Ahead, more: dict[str, Any]) -> DataLoader[Any]:
    data: Dataset[Any] = dataset  # type: ignore[assignment]
    return DataLoader(data, batch_sampler=ahead, **more)


def _with_rows(job: Job, loader: Iterable[Any], keys: Keys | None) -> Iterator[Any]:
    """The batches of `loader`; before each the model receives the keys of the one after it."""
    if keys is None:
        yield from loader
        return
    if not job._sparse:
        raise InputError("keys= is for the sparse modules of an attached model, and there are none; leave it out")
    for batch, following in pairwise(chain(loader, [None])):
        if following is not None:
            job._sparse.will_read(keys(following))
        yield batch


def _count(job: Job, assignment: _Assignment, batch: Any) -> Any:
    job._examples += len(assignment.rows)
    job._scale = assignment.scale
    if job._local_steps is not None:
        job._local_steps.ends_here = assignment.ends_exchange
    return batch


class EpochSampler(torch.utils.data.Sampler[int]):
    """See `Job.sampler`."""

    def __init__(self, job: Job, dataset: Sized, batch_size: int | None, accumulate: int) -> None:
        _refuse_elastic(job)
        if job._environment.adaptive:
            text = "a sampler gives batches of one size, and spec.training.batch.adaptive deals out others"
            raise InputError(f"{text}; read by job.batches or job.share, or leave adaptive out")
        self._job = job
        self._size = job._environment.batch_size if batch_size is None else batch_size
        self._accumulate = accumulate
        self._sampler = _WholeSteps(job, _sampler(job, dataset, self._size), accumulate)

    def __len__(self) -> int:
        return self._sampler.steps_per_epoch * self._size

    def __iter__(self) -> Iterator[int]:
        job = self._job
        begin = job._planned
        end = job._planned = begin + self._sampler.steps_per_epoch
        if job._sampled is None:
            job._sampled = job._rewinds
        for number in range(max(begin, job._resume * self._accumulate), end):
            job._check_stop()
            job._check_sampled()
            for row in self._sampler.batch(number):
                job._examples += 1
                yield row
        job._check_sampled()
