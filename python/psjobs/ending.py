"""The end of a trainer's process: it leaves its job, and says whether the work is done, and if not why."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import traceback
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, NoReturn

from psjobs import _native, exit_code

if TYPE_CHECKING:
    from psjobs.job import Job

DONE = 0
"""Exit code of a script whose work the others have done, as in an elastic job that went on without it."""
WRONG_INPUT = 2
"""Exit code of a script that was given what cannot work: another start would end the same way."""
PEER_AWAY = 75
"""Exit code of a script that only other processes end, as a server that is away: it is started again, uncounted."""
TERMINATED = 128 + signal.SIGTERM
"""Exit code of a script that was asked to end."""

INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a script that Ctrl-C ends after its last line."""

LONGEST = 2000
"""The most characters of an error that servers receive."""


def watch(job: Job) -> None:
    """Leaves `job` when this process ends, in whichever way: at its end, by an exception, by sys.exit or by SIGTERM."""
    end = _End(job)
    atexit.register(end.at_exit)
    end.hook_exceptions()
    exit_code.hook()
    end.hook_signals()
    os.register_at_fork(after_in_child=end.forget)


def hook_input_errors() -> None:
    """Lets an InputError that nothing catches end a process that is no trainer yet as it ends a trainer, with exit code 2."""
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, _native.InputError):
            sys.stderr.write(f"psjobs: {error}\n")
            raise SystemExit(WRONG_INPUT)
        show(kind, error, trace)

    sys.excepthook = hook


def leave_with_error(job: Job, error: BaseException) -> int | None:
    """Leaves `job` because of `error`; returns the exit code, where it is not Python's own."""
    session = job._session
    if session is not None and not job._left:
        if isinstance(error, KeyboardInterrupt):
            job.leave(finished=False)
        elif not isinstance(error, (_native.PeerAway, _native.Conflict, _native.Interrupted, _native.Over)):
            job._left = True
            session.fail(_describe(error))
    if isinstance(error, _native.InputError):
        return WRONG_INPUT
    if isinstance(error, _native.Over):
        return DONE
    return PEER_AWAY if _is_caused_by_others(job, error) else None


def _is_caused_by_others(job: Job, error: BaseException) -> bool:
    """True if only other processes end this one. A conflict counts as that where somebody starts processes again, because
    they replace each other there; by hand it is a mistake."""
    conflicts = isinstance(error, _native.Conflict) and job._environment.supervised
    return conflicts or isinstance(error, _native.PeerAway)


def _describe(error: BaseException) -> str:
    """The last frame and the error, in one line."""
    said = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SystemExit):
        said = f"the script ended with exit code {error.code}"
    if frames:
        last = frames[-1]
        said += f" ({last.filename}, line {last.lineno}, in {last.name}: {last.line})"
    return " ".join(said.split())[:LONGEST]


class _End:
    """What happens at the end of a process that is a trainer; nothing in those that are forked from it."""

    def __init__(self, job: Job) -> None:
        self._job: Job | None = job
        self._is_interrupted = False

    def forget(self) -> None:
        """In a process that was forked: the trainer is another one."""
        if self._job is not None:
            self._job = None
            if signal.getsignal(signal.SIGTERM) == self._terminate:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def hook_exceptions(self) -> None:
        """Before an exception that nothing catches is shown, the servers hear of it."""
        show = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            job, self._job = self._job, None
            self._is_interrupted = isinstance(error, KeyboardInterrupt)
            code = None if job is None else self._leave_with_error(job, error)
            if code in (DONE, WRONG_INPUT, PEER_AWAY):
                sys.stderr.write(f"psjobs: {error}\n")
                raise SystemExit(code)
            show(kind, error, trace)

        sys.excepthook = hook

    @staticmethod
    def _leave_with_error(job: Job, error: BaseException) -> int | None:
        try:
            return leave_with_error(job, error)
        except _native.Error as unheard:
            sys.stderr.write(f"psjobs: the servers do not hear why this trainer ends: {unheard}\n")
            return None

    def hook_signals(self) -> None:
        """SIGTERM asks the trainer to end after its step, unless the script listens to it."""
        try:
            if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._terminate)
        except ValueError:
            pass  # Only the main thread may listen.

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        job = self._job
        if job is None or job.should_stop or job._parameters is None:
            raise SystemExit(TERMINATED)
        job._interrupt.set()

    def at_exit(self) -> None:
        """Leaves the job, if nothing did before."""
        if self._is_interrupted:
            _die_of_interrupt()
        # It is kept: while this waits for servers, SIGTERM asks it to end as it does in a step.
        job = self._job
        if job is None or job._session is None or job._left:
            return
        code = exit_code.noted()
        # After a second SIGTERM the code is the package's own.
        if not exit_code.is_success(code) and not (job.should_stop and code == TERMINATED):
            self._leave_with_error(job, SystemExit(code))
            return
        try:
            job.leave(finished=not job.should_stop)
        except _native.Error as error:
            sys.stderr.write(f"psjobs: {error}\n")
            if isinstance(error, _native.Over):
                _exit(DONE)
            _exit(PEER_AWAY if _is_caused_by_others(job, error) else 1)
        except KeyboardInterrupt:
            _exit(INTERRUPTED)
        except SystemExit:
            _exit(TERMINATED)  # SIGTERM came again. Python ends with 0 after an exception at exit.
        if job.should_stop:
            _exit(TERMINATED)


def _die_of_interrupt() -> None:
    """Ends the process by SIGINT, as Python does after an exception that nothing catches: a shell then ends its loop. Python
    forgets it where something runs code at exit (seen with 3.12)."""
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _exit(code: int) -> NoReturn:
    """Ends the process with `code`, which a function that runs at exit cannot do otherwise."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
