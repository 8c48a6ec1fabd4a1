"""The number of files that a process of a run may have open: sockets and pipes between processes count, too."""

from __future__ import annotations

import resource

from harness.core.problem import Problem

FOR_A_PROCESS, FOR_A_RANK = 32, 8
"""Of the process that starts the ranks of MPI or of gloo, which needs most; measured with 1 to 8 ranks: 77 for 8."""
USUAL = 1024


def problems(ranks: int) -> list[Problem]:
    """Returns the problem of a limit (`ulimit -n`) that is too small for so many ranks on this machine.

    Libraries that have no descriptor left say so in words of theirs, end by a signal, or hang.
    """
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], FOR_A_PROCESS + FOR_A_RANK * ranks
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return []
    processes = f"{ranks} rank{'s' * (ranks > 1)}"
    message = f"is too small, {processes} and the process that starts them need up to {needed} open files"
    return [Problem("ulimit -n", limit, message, hint=f"ulimit -n {max(USUAL, needed)}")]
