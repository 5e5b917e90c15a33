"""A trainer's place in its job, from `join` to its end."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeVar

from psjobs import _native, ending, exit_code
from psjobs.step_clock import StepClock

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

    from psjobs.batches import SharedLoader
    from psjobs.local_steps import LocalSteps
    from psjobs.overlapped_exchanges import OverlappedExchanges
    from psjobs.parameter_groups import Group
    from psjobs.parameters import Parameters
    from psjobs.sparse import Rows, SparseModule, SparseModules

    Model = TypeVar("Model", bound=torch.nn.Module)

REPORT_EVERY = 1.0
"""Seconds between two reports to the servers."""


def join() -> Job:
    """Reads this process's place in a job from its environment; without a job the script trains alone.

    In a job it seeds torch, so that the trainers begin with the same model: build the model afterwards. The process
    leaves the job when it ends, or at the end of a `with` block.

    Raises InputError if the environment is wrong, or that of a server.
    """
    try:
        environment = _native.Environment.read()
    except _native.InputError:
        ending.hook_input_errors()
        raise
    return Job(environment)


class Job:
    """A trainer's place in its job. `join` makes it."""

    def __init__(self, environment: _native.Environment) -> None:
        self._environment = environment
        self._interrupt = _native.Interrupt()
        self._session: _native.Session | None = None
        self._model: torch.nn.Module | None = None
        self._parameters: Parameters | None = None
        self._sparse: SparseModules | None = None
        self._local_tables: _native.LocalTables | None = None
        self._local_steps: LocalSteps | None = None
        self._exchanges: OverlappedExchanges | None = None
        self._step = 0
        # The step of the exchange that was begun last, without waiting for its end.
        self._begun = 0
        self._steps_done = 0
        # Where reading begins: the first step of this process, or the one that the servers went back to.
        self._resume = 0
        self._rewinds = 0
        # How often the servers had gone back when a sampler began, whose loader cannot go back with them; none without one.
        self._sampled: int | None = None
        self._planned = 0
        self._examples = 0
        self._scale = 1.0
        self._metrics: dict[str, float] = {}
        # Takes what is reported, with its step, too.
        self._log: Callable[[int, dict[str, float]], None] | None = None
        self._left = False
        self._began = self._reported = time.monotonic()
        self._clock = StepClock()
        if self.alone:
            sys.stderr.write("psjobs: this process is no trainer of a job, so the script trains alone, without servers\n")
        else:
            import torch

            torch.manual_seed(environment.seed)
            ending.watch(self)

    @property
    def alone(self) -> bool:
        """True if the script is not part of a job."""
        return self._environment.name is None

    @property
    def trainer(self) -> int:
        """This trainer's index among `trainers`, from 0."""
        return self._environment.trainer

    @property
    def trainers(self) -> int:
        """Number of trainers; in an elastic job the most there may be."""
        return self._environment.trainers

    @property
    def step(self) -> int:
        """The step that comes next, counted from 0 over all processes of this trainer."""
        return self._step

    @property
    def should_stop(self) -> bool:
        """True once the process was asked to end (SIGTERM). `batches` then ends it by itself."""
        return self._interrupt.is_set()

    def attach(
        self,
        model: Model,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        missing: Literal["error", "zero"] | None = None,
        overlap: bool = True,
    ) -> tuple[Model, torch.optim.Optimizer]:
        """Joins the servers with this model, and moves its trainable parameters to the memory shared with them, or, of a model
        on a GPU, to memory there that is copied from and to it: move the model to its GPU before.

        The parameters take the values that the servers have, or give them theirs if this trainer is the first. Returns
        the same model, and an optimizer whose `step` exchanges gradients for parameters by the job's rule. If that is not
        the rule of `optimizer`, the script's own, a warning says what to set. Its parameter groups count: what they differ
        in, learning rate as a factor on the job's and weight decay, holds at the servers, unless the job has groups of its
        own (`spec.training.optimizer.groups`). A script that is alone gets its own optimizer back, or torch's of the job's
        rule.

        `missing` says what follows when a step's backward() reaches some parameters not at all: with "zero" their gradient
        is zero, and a warning names each once; with "error" `step` raises InputError. By default it is an error in Sync,
        where all trainers wait for each other to make one exact step, and zero in the other modes.

        With `overlap`, gradients leave while backward() still computes others, once the first two steps have shown that
        the script does not change them afterwards, as by clipping. Parameters arrive meanwhile: after backward() has
        computed a parameter's gradient, the step must not read its values any more, as through `detach()`.

        In a job whose exchanges overlap (`spec.training.consistency.overlap`) `step` returns when the gradient is on its way to the
        servers. The next backward() computes with the parameters that the model has, which takes those that come back in the
        next `step`, or at the end of `batches`. Gradients leave in `step` alone.

        In a job with local steps (`spec.training.local`) the optimizer returned is the script's own, or torch's of the job's
        rule: it changes the model as it would alone, so that the script's own needs its `zero_grad`, and every so many of its
        steps exchange what they have changed.

        Raises InputError if the model cannot be trained or is not the job's, or the optimizer has parameters that are not
        the model's, PeerAway if a server stays away.
        """
        from psjobs import optimizers, parameter_groups, parameters, sparse
        from psjobs.local_steps import LocalSteps
        from psjobs.overlap import Overlap
        from psjobs.overlapped_exchanges import OverlappedExchanges

        if self._parameters is not None:
            raise _native.InputError("this job has a model already; attach is called once in a process")
        self._parameters, self._sparse = parameters.Parameters(model), sparse.SparseModules(model)
        self._model = model
        if self.alone:
            if self._sparse:
                self._local_tables = _native.LocalTables(self._environment, self._sparse.tables)
                self._sparse.read_from(self._local_tables)
            if optimizer is not None:
                own = optimizers.counted(optimizer, self)
            else:
                own = optimizers.alone(self._parameters, self._environment, self)
            return model, self._sparse.list_in(own)
        if self._sparse and (self._environment.elastic or self._environment.backup_trainers):
            text = "sparse modules need trainers that all make every step; take elasticPolicy or backupTrainers from the job"
            raise _native.InputError(text)
        named = self._parameters.named
        if self._environment.gpus and all(tensor.device.type == "cpu" for _, tensor in named):
            text = "this trainer was given a GPU (spec.trainer.gpus), but the model is on the CPU"
            warnings.warn(f'psjobs: {text}; move it there before attach: model.to("cuda")', stacklevel=2)
        groups = parameter_groups.of_job(named, self._environment)
        is_local = self._environment.is_local
        if is_local:
            groups = [parameter_groups.Group()] * len(named)
        elif optimizer is not None:
            optimizers.compare(optimizer, self._environment)
            if not any(group != parameter_groups.Group() for group in groups):
                groups = parameter_groups.of_script(named, optimizer)
        self._session = self._enter(self._parameters, groups)
        if self._sparse:
            self._session.open_tables(self._sparse.tables)
            self._sparse.read_from(self._session)
        self._step = self._resume = self._session.next_step() * self._environment.steps_per_exchange
        is_overlapped = self._environment.overlaps_exchanges and not is_local
        self._parameters.place(self._session, is_shared=not is_local, is_copied=is_overlapped)
        import torch

        # Each trainer has its own dropout from here on, and another one after a restart.
        torch.manual_seed(hash((self._environment.seed, self.trainer + 1, self._step)) & (2**63 - 1))
        if is_local:
            own = optimizer or optimizers.alone(self._parameters, self._environment, self, is_counted=False)
            self._local_steps = LocalSteps(self, self._parameters, self._session, own)
            return model, self._sparse.list_in(own)
        session = self._session
        if is_overlapped:
            self._exchanges = OverlappedExchanges(self, self._parameters, session)
        is_wanted = overlap and not self._environment.adaptive and not is_overlapped
        overlapping = Overlap(
            self._parameters, session.block_elements(), lambda first: session.offer(self._step, first), is_wanted
        )
        is_error = self._environment.sync if missing is None else missing == "error"
        rate = self._environment.learning_rate
        weight_decay = json.loads(self._environment.optimizer)["weightDecay"]
        shown = parameter_groups.settings(named, groups, rate(self._step), weight_decay)
        own = optimizers.ServerOptimizer(self, self._parameters, overlapping, rate, is_error, shown)
        return model, self._sparse.list_in(own)

    def batches(
        self,
        dataset: Sized | Iterable[Any],
        batch_size: int | None = None,
        *,
        epochs: int = 1,
        accumulate: int = 1,
        keys: Callable[[Any], Mapping[SparseModule, torch.Tensor]] | None = None,
        **loader: Any,
    ) -> Iterator[Any]:
        """This trainer's batches of `epochs` passes of all trainers over `dataset`, one for each `opt.step()`.

        The trainers share each epoch out without overlap, in an order that follows from the job's seed; a further call
        goes on with the next epoch. Each batch has `batch_size` examples, or as many as the job says; `accumulate`
        batches belong to one step. What else is given goes to `torch.utils.data.DataLoader`, as `num_workers` or
        `collate_fn`. A restarted trainer goes on with the step that the servers do not have. In an elastic job batches
        are dealt out anew as trainers come and go; there one call has all epochs.

        A data set without a length, as an IterableDataset, must give the same examples in the same order to each trainer:
        of `trainers * batch_size` in a row each trainer takes its part, and what is left at the end is left out.

        `keys` returns the keys, int64, that the sparse modules of the model will look up for a batch: their rows come with
        the step before, in one answer for all tables, and `forward` does not wait for them. It fetches those of other keys
        as ever.

        Raises InputError if the data set is too small for one step.
        """
        from psjobs import batches

        return batches.timed(self, batches.batches(self, dataset, batch_size, epochs, accumulate, loader, keys))

    def share(
        self,
        loader: DataLoader[Any],
        *,
        accumulate: int = 1,
        keys: Callable[[Any], Mapping[SparseModule, torch.Tensor]] | None = None,
    ) -> SharedLoader:
        """The script's own DataLoader, cut down to this trainer's share of its data set: each iteration is the next epoch.

        Batch size, workers and `collate_fn` are the loader's; the job's order takes the place of its sampler, and is over the
        same examples. `accumulate` batches belong to one step, and batches of an epoch that do not fill a step are left out.
        `keys` is as in `batches`.

        Raises InputError if the loader has a batch sampler of its own or gives some examples more often than others, if an
        epoch has no step, in an elastic job, and as `batches`.
        """
        from psjobs import batches

        return batches.SharedLoader(self, loader, accumulate, keys)

    def sampler(
        self, dataset: Sized, batch_size: int | None = None, *, accumulate: int = 1
    ) -> torch.utils.data.Sampler[int]:
        """This trainer's examples of one epoch, for a DataLoader of the script's own with the same `batch_size`.

        Each iteration is the next epoch; `accumulate` batches belong to one step, and batches of an epoch that do not fill a
        step are left out. Raises InputError in an elastic job, where only `batches` can follow trainers that come and go, if an
        epoch has no step, and as `batches`.
        """
        from psjobs import batches

        return batches.EpochSampler(self, dataset, batch_size, accumulate)

    def report(self, metrics: Mapping[str, float]) -> None:
        """Reports these metrics to the job, as accuracy or loss: they are shown while it runs and in its result.

        Where the job keeps its metrics over time, beside its checkpoints or with `psjobs run --log-dir`, each value becomes a
        point at the steps that are done. The first value that a metric gets at a step is the one that counts.
        """
        values = {name: float(value) for name, value in metrics.items()}
        self._metrics.update(values)
        if self._log is not None:
            self._log(self._step, values)
        if self._session is not None and not self._left:
            self._session.report(self._examples, self._metrics, self._clock.spent())
            self._session.record(self._step, values)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes the model's `state_dict()`, as it is now, to a safetensors file, which is there whole or not at all.

        Trainer 0 writes it; in the others this does nothing, so that all may call it. With local steps it has what this
        trainer's steps since the last exchange have changed, and where exchanges overlap it lacks the one under way; after
        `leave` it is the job's. To begin with such a file:
        `model.load_state_dict(psjobs.safetensors.read(file))` before `attach`. Raises InputError if no model is attached, OSError
        if the file cannot be written.
        """
        from psjobs import safetensors

        if self._model is None:
            raise _native.InputError("no model is attached yet, so there is none to save; call job.attach(model) first")
        if self.alone or self.trainer == 0:
            safetensors.write(file, self._model.state_dict())

    def leave(self, finished: bool = True) -> None:
        """Leaves the job; the model keeps its last parameters. The end of the process does it, so few scripts need it.

        With `finished` the work is done, and this returns when losing servers can no longer cost a step of it; else
        another process will take this trainer's place. Raises PeerAway if the servers had to go back meanwhile.
        """
        session = self._session
        if session is None or self._left:
            return
        is_done = finished
        if finished:
            step = self._step
            if self._local_steps is not None:
                self._local_steps.finish()
            self._settle()
            if self._step < step and not self._environment.elastic:
                self._lost_steps(self._step)
            self._check_sampled()
        if finished and not self._environment.elastic:
            finished = self._keep(session)
        waiting = session.waiting()
        self._left = True
        try:
            session.leave(finished, self._examples, self._metrics)
        except _native.PeerAway:
            # The servers may have counted it as finished and ended; who starts it again knows.
            if finished:
                self._write_result(waiting)
            raise
        if finished:
            self._write_result(waiting)
        elif is_done and self.should_stop:
            # SIGTERM came before the servers had all: the servers await another process, and so must who starts it.
            raise SystemExit(ending.TERMINATED)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or exit_code.is_end(error):
            self.leave(finished=not self.should_stop)
        else:
            ending.leave_with_error(self, error)

    def _enter(self, parameters: Parameters, groups: list[Group]) -> _native.Session:
        shapes = parameters.shapes()
        tensors = [(name, shape, *group) for (name, shape), group in zip(shapes, groups, strict=True)]
        try:
            return _native.Session(self._environment, tensors, parameters.initial(), self._interrupt)
        except _native.InputError as error:
            listed = ", ".join(f"{name} {shape}" for name, shape in shapes)
            raise _native.InputError(f"{error}; this trainer's parameters are {listed}") from None
        except _native.Interrupted:
            raise SystemExit(ending.TERMINATED) from None
        except _native.Over as error:
            sys.stderr.write(f"psjobs: {error}\n")
            raise SystemExit(0) from None

    def _exchange(self, parameters: Parameters) -> None:
        """Sends the gradients of this step and waits for the parameters."""
        rows, wanted, room = self._take_gradients(parameters)
        number = self._step // self._environment.steps_per_exchange
        following, have_come = self._wait_for_exchange(parameters, number, rows, room)
        self._fetched(wanted if have_come else [])
        if following != number + 1:
            self._go_back_to(following)
        else:
            self._step = following * self._environment.steps_per_exchange - 1
            self._did_step()

    def _take_gradients(
        self, parameters: Parameters
    ) -> tuple[list[Rows], list[tuple[int, torch.Tensor, torch.Tensor]], list[Rows]]:
        """Scales the gradients of this step. Returns those of its rows, which are forgotten here, the rows that are wanted after
        it, and their room."""
        from psjobs.buffers import floats, integers

        if self._scale != 1.0:
            parameters.scale(self._scale)
        rows = self._sparse.gradients(self._scale) if self._sparse else []
        wanted = self._sparse.wanted() if self._sparse else []
        room = [(table, integers(keys), floats(values)) for table, keys, values in wanted]
        return rows, wanted, room

    def _fetched(self, rows: list[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
        if self._sparse:
            self._sparse.fetched(rows)

    def _joined(self) -> _native.Session:
        session = self._session
        if session is None or self._left:
            raise _native.Error("this trainer has left its job, so opt.step() has no servers to ask")
        return session

    def _begin_exchange(self, number: int, rows: Sequence[Rows], room: Sequence[Rows]) -> bool:
        """Begins an exchange, whose gradients are all there. Returns whether the rows have come."""
        self._begun = self._step
        try:
            return self._joined().begin(number, rows, room)
        except _native.Interrupted:
            self._stop()
        except _native.InputError as error:
            raise _native.Error(str(error)) from None

    def _end_exchange(self, settles: bool) -> tuple[int, bool] | None:
        """Waits for the exchange that was begun, if one was. Returns the one that follows, and whether the servers went back, so
        that what was computed meanwhile does not count. With `settles` what comes next is computed with the parameters that
        have come."""
        try:
            with self._clock.apart():
                return self._joined().end(settles)
        except _native.Interrupted:
            self._stop()
        except _native.InputError as error:
            raise self._refused(error, self._begun) from None

    def _settle(self) -> None:
        """Waits for the exchange under way, if one is."""
        if self._exchanges is not None:
            self._exchanges.settle()
        if self._local_steps is not None:
            self._local_steps.settle()

    def _wait_for_exchange(
        self, parameters: Parameters, number: int, rows: Sequence[Rows], room: Sequence[Rows]
    ) -> tuple[int, bool]:
        """Makes an exchange. Returns the one that follows, and whether the rows have come."""
        session = self._joined()
        try:
            parameters.memory.finish(lambda first: session.offer(number, first))
            with self._clock.apart():
                return session.exchange(number, rows, room)
        except _native.Interrupted:
            self._stop()
        except _native.InputError as error:
            raise self._refused(error, self._step) from None

    def _refused(self, error: _native.InputError, step: int) -> _native.Error:
        """The error of an exchange that the servers refused, that of `step`: it names the gradient that is not finite."""
        name = self._parameters.not_finite() if self._parameters is not None else None
        if name is None:
            return _native.Error(str(error))
        text = f"trainer {self.trainer}: the gradient of {name} is not finite at step {step}"
        return _native.Error(f"{text}; lower the learning rate, clip the gradient, or look at the data")

    def _go_back_to(self, exchange: int) -> None:
        """The servers went back to a checkpoint: batches are read again from there."""
        self._rewinds += 1
        self._resume = self._step = exchange * self._environment.steps_per_exchange
        self._count_step()

    def _did_step(self) -> None:
        if self._local_tables is not None and self._sparse is not None:
            self._local_tables.push(self._step, self._sparse.gradients())
        self._step += 1
        self._count_step()

    def _count_step(self) -> None:
        self._steps_done += 1
        self._clock.enter(None)
        if self._session is not None and (now := time.monotonic()) - self._reported >= REPORT_EVERY:
            self._reported = now
            self._session.report(self._examples, self._metrics, self._clock.spent())

    def _discard_rows(self) -> None:
        if self._sparse is not None:
            self._sparse.discard()

    def _check_stop(self) -> None:
        """Leaves and ends the process if it was asked to."""
        if self.should_stop and not self.alone:
            self._stop()

    def _stop(self) -> NoReturn:
        self.leave(finished=False)
        raise SystemExit(ending.TERMINATED)

    def _keep(self, session: _native.Session) -> bool:
        """Waits until the servers keep every step; false if the process was asked to end meanwhile."""
        try:
            following = session.finish()
        except _native.Interrupted:
            return False
        first = following * self._environment.steps_per_exchange
        if first < self._step:
            self._lost_steps(first)
        return True

    def _check_sampled(self) -> None:
        """Ends this process if the servers went back after a sampler had begun: its loader has read on."""
        if self._sampled is not None and self._rewinds != self._sampled:
            self._lost_steps(self._step)

    def _lost_steps(self, first: int) -> NoReturn:
        """Ends this process, because it cannot do the steps from `first` on again: it has read what they need."""
        self._left = True
        raise _native.PeerAway(
            f"the servers went back to step {first}, and this process has read on behind it; it does the steps from there on "
            "again when it is started again"
        )

    def _write_result(self, waiting: float) -> None:
        file = self._environment.result_file
        if file is None:
            return
        seconds = time.monotonic() - self._began
        text = _native.result(self._steps_done, self._examples, seconds, waiting, self._metrics)
        if os.path.exists(file):
            # In a pod it is a mount, which cannot be replaced.
            with open(file, "w", encoding="utf-8") as result:
                result.write(text)
            return
        part = f"{file}.{os.getpid()}.part"
        with open(part, "w", encoding="utf-8") as result:
            result.write(text)
        os.replace(part, file)
