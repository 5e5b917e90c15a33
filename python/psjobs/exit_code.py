"""The code with which a script ends its process: Python does not say it to what runs at exit."""

from __future__ import annotations

import sys
import threading
from typing import Any, ClassVar, NoReturn

_CODE: Any = vars(SystemExit)["code"]


class _NotedExit(SystemExit):
    """The SystemExit of `sys.exit`, which notes its code when Python ends the process with it."""

    noted: ClassVar[object] = None

    @property
    def code(self) -> Any:
        code = _CODE.__get__(self)
        if sys._getframe().f_back is None:
            # No function asks: it is Python, after nothing has caught this.
            _NotedExit.noted = code
        return code

    @code.setter
    def code(self, code: Any) -> None:
        _CODE.__set__(self, code)


# Tracebacks show the name.
_NotedExit.__module__, _NotedExit.__name__, _NotedExit.__qualname__ = "builtins", "SystemExit", "SystemExit"


def hook() -> None:
    """Lets the code be noted with which `sys.exit` ends this process. A `raise SystemExit(...)` of the script is not noted."""
    leave, show = sys.exit, threading.excepthook

    def exit_noted(code: object = None, /) -> NoReturn:
        try:
            leave(code)  # type: ignore[arg-type]
        except SystemExit as plain:
            code = plain.code
        raise _NotedExit(code)

    def show_in_thread(args: Any) -> None:
        # Python ends a thread without a word for its own class only.
        if not issubclass(args.exc_type, SystemExit):
            show(args)

    sys.exit = exit_noted
    setattr(threading, "excepthook", show_in_thread)


def noted() -> object:
    """The code of the `sys.exit` that ends this process; none without one."""
    return _NotedExit.noted


def is_success(code: object) -> bool:
    """True if Python ends with exit code 0 after a SystemExit of this code."""
    return code is None or (isinstance(code, int) and code == 0)


def is_end(error: BaseException) -> bool:
    """True if a script that this ends has done its work."""
    return isinstance(error, SystemExit) and is_success(error.code)
