"""A live table of a job, where a notebook shows what this process says."""

from __future__ import annotations

import html
import importlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

PERIOD = 0.5
"""Seconds between two looks at the job."""


def table() -> Table | None:
    """A table if this process is the kernel of a notebook, which has imported IPython; else none."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return Table() if shell is not None and hasattr(shell, "kernel") else None


class Table:
    """Rows with the state of a job in the output of a notebook's cell, which are replaced as it changes."""

    def __init__(self) -> None:
        # By name, since the package works without IPython.
        ipython = importlib.import_module("IPython.display")
        self._html = ipython.HTML
        self._display = ipython.display(ipython.HTML(""), display_id=True)

    def show_until_over(
        self, status: Callable[[], Mapping[str, Any]], process: subprocess.Popen[str], timeout: float | None
    ) -> None:
        """Shows the job until its process has ended. Raises TimeoutExpired after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            self._display.update(self._html(rows(status())))
            try:
                process.wait(PERIOD if end is None else min(PERIOD, max(end - time.monotonic(), 0.0)))
                break
            except subprocess.TimeoutExpired:
                if end is not None and time.monotonic() >= end:
                    raise
        self._display.update(self._html(rows(status())))


def rows(status: Mapping[str, Any]) -> str:
    """The table of a status as HTML; texts of the job are escaped."""
    total = status.get("totalSteps")
    step = status.get("step", status.get("steps"))
    shown = {
        "state": status.get("state"),
        "step": f"{step:,} of {total:,}" if step is not None and total else None if step is None else f"{step:,}",
        "examples/s": _number(status.get("examplesPerSecond", status.get("examples_per_second"))),
        **{name: _number(value) for name, value in sorted((status.get("metrics") or {}).items())},
        "warnings": "; ".join(status.get("warnings") or []) or None,
    }
    cells = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in shown.items()
        if value is not None
    )
    return f"<table>{cells}</table>"


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:,.4g}"
