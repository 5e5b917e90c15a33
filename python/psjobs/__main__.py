"""The programs of the package: `psjobs`, also as `python -m psjobs`, and `psjobs-worker`, whose servers it starts."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import sysconfig
from typing import NoReturn

from psjobs import _native


def main() -> NoReturn:
    """The command `psjobs`."""
    worker = pathlib.Path(sysconfig.get_path("scripts"), "psjobs-worker")
    if worker.is_file():
        os.environ.setdefault("PSJOBS_WORKER", str(worker))
    # Python's own handler only notes a Ctrl-C, for bytecode that no longer runs. psjobs sets its own.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    os._exit(_native.psjobs([sys.executable, "-m", "psjobs"], sys.argv[1:]))


def worker() -> NoReturn:
    """The command `psjobs-worker`, of which this package has `serve` and `store`."""
    os._exit(_native.worker(sys.argv[1:]))


if __name__ == "__main__":
    main()
