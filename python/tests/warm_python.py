"""Processes of Python that have imported torch already, which else takes each of them three to four seconds of a core.

One process imports it, and each script runs in a copy of that process, forked for it: a process of its own with its own
variables, output and end. As a program this file is the process that is copied.
"""

import ctypes
import json
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

LONGEST = 1 << 20
"""Bytes of a request."""

PR_SET_CHILD_SUBREAPER = 36


class Original:
    """The process that is copied; it ends with this one."""

    def __init__(self) -> None:
        # A copy whose parent has ended becomes a child of this process, which can wait for it as for any other.
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        nothing = subprocess.DEVNULL
        self._process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()], stdin=nothing, stdout=nothing)
        theirs.close()

    def copy(self, script: list[str], env: dict[str, str], outputs: list[int]) -> int:
        """Runs a script with its arguments in a copy with these variables, stdout and stderr; returns its number."""
        request = json.dumps({"script": script, "env": env, "folder": os.getcwd()}).encode()
        assert len(request) < LONGEST, "the variables are too long"
        socket.send_fds(self._socket, [request], outputs)
        return int(self._socket.recv(32))


class WarmPython(subprocess.Popen[str]):
    """As `Popen([sys.executable, *script], env=env, stdout=PIPE, stderr=PIPE, text=True)`."""

    def __init__(self, original: Original, script: list[str], env: dict[str, str]) -> None:
        self._original = original
        super().__init__(script, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def _execute_child(self, args: list[str], *how: Any) -> None:
        env = how[5]
        pipes = how[9:15]
        self.pid = self._original.copy(args, env, [pipes[3], pipes[5]])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def be_copied(number: int) -> pathlib.Path:
    """Makes copies until nobody can ask for more. Returns in each of them, with its script."""
    import torch  # noqa: F401

    # The first optimizer imports it.
    import torch._dynamo  # noqa: F401

    asked = socket.socket(fileno=number)
    while True:
        request, outputs, _, _ = socket.recv_fds(asked, LONGEST, 2)
        if not request:
            os._exit(0)
        ours, theirs = os.pipe()
        if (between := os.fork()) == 0:
            if (copy := os.fork()) == 0:
                break
            # Whoever asked becomes the parent of the copy by this.
            os.write(theirs, str(copy).encode())
            os._exit(0)
        os.waitpid(between, 0)
        asked.send(os.read(ours, 32))
        for fd in (ours, theirs, *outputs):
            os.close(fd)
    for fd, output in enumerate(outputs, start=1):
        os.dup2(output, fd)
    for fd in (ours, theirs, *outputs):
        os.close(fd)
    asked.close()
    wanted = json.loads(request)
    os.chdir(wanted["folder"])
    os.environ.clear()
    os.environ.update(wanted["env"])
    sys.argv = wanted["script"]
    return pathlib.Path(sys.argv[0])


def run(script: pathlib.Path) -> None:
    """Runs the script as the program of this process."""
    code = compile(script.read_bytes(), script, "exec")
    names = vars(sys.modules["__main__"])
    own = {"__name__": "__main__", "__builtins__": names["__builtins__"], "__file__": str(script)}
    names.clear()
    names.update(own)
    exec(code, names)


if __name__ == "__main__":
    run(be_copied(int(sys.argv[1])))
