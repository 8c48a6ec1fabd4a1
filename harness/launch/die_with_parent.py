"""Run a command that dies with its parent, also if that is killed: `python die_with_parent.py PARENT_PID COMMAND ...`

A script of its own: it asks the kernel (Linux) for the signal, then becomes the command. It works for any command,
`mpiexec` too, and needs no code between fork and exec in a parent that has threads.
"""

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def prefix() -> list[str]:
    """The start of a command line whose process dies with this one."""
    return [sys.executable, "-S", "-E", __file__, str(os.getpid())]


def die_with(parent: int) -> None:
    """Have this process die with its `parent`; it ends at once if that is gone already."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def main(parent: int, command: list[str]) -> None:
    """Become `command`, unless the parent is gone already."""
    die_with(parent)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
