"""Starts the ranks of one host and ends all when the first one fails, or stdin ends. Started by `starter` over ssh.

    python -m harness.launch.hosts.agent HOST FIRST_RANK RANKS COMMAND OF A RANK

On stdin comes ASK where ranks are to write what they do. A rank's end that is not good is a line of `slurm_log`.
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from harness.host import oom_killer
from harness.launch import die_with_parent, same_checkout, slurm_log
from harness.launch.signals import ENDING, blocked

READY, LINE, ASK = "launch: ready", "launch: error: ", b"?"
"""The line that says that a host has answered; how lines begin that say what is wrong there; what is asked on stdin."""
CHECKED = "REGATTA_CODE"
"""The variable with the digest of the code of the parent."""
VISIBLE_S = 20.0
"""Seconds after which a folder that the parent has made is there on every host, if they share it."""
POLL_S = 0.05
LATE_S = 1.0
"""Seconds for which a rank may be ending already when the end of all is asked for."""
FOLDER = 4
"""Which word of the command of a rank is the folder of the run: python -P -m harness.worker FOLDER train ..."""


def unfit(folder: Path) -> str:
    """Why this host cannot train in the folder; "" if it can."""
    return same_checkout.unfit(folder, os.environ[CHECKED], VISIBLE_S, "the parent", "hosts")


def start(rank: int, local: int, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a rank, in a session of its own, which ends with this process."""
    with blocked():
        return subprocess.Popen(
            [*die_with_parent.prefix(), *command],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(local)},
            start_new_session=True,
        )


def watch(host: str, first: int, ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all ranks have ended well, the first one has not, or stdin ends; returns the exit code.

    A rank that is killed loses its connections before it has ended. So stdin may end, since another host has lost a
    rank's connection to this one, while it is ending: for `LATE_S` its end is still reported.
    """
    kills, until = oom_killer.kill_count(), math.inf
    while any(codes := [rank.poll() for rank in ranks]) or None in codes:
        for number, code in enumerate(codes):
            if code:
                killed = code == -signal.SIGKILL and oom_killer.was_oom_kill(kills)
                how = "Out Of Memory" if killed else ""
                print(slurm_log.task_line(host, first + number, code, how), end="", flush=True)
                return 1
        if time.monotonic() > until:
            return 1
        if until < math.inf:
            time.sleep(POLL_S)
        elif select.select([sys.stdin], [], [], POLL_S)[0]:
            if not (asked := os.read(sys.stdin.fileno(), 1)):
                until = time.monotonic() + LATE_S  # whoever has started this process wants its end, or is gone
            for rank in ranks if asked == ASK else ():
                rank.send_signal(signal.SIGUSR2)
    return 0


def main(host: str, first: int, count: int, command: Sequence[str]) -> int:
    """Start the ranks, and wait for their end; returns the exit code."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)  # stdin says when to end
    if wrong := unfit(Path(command[FOLDER])):
        print(f"{LINE}{host}: {wrong}", flush=True)
        return 1
    print(READY, flush=True)
    ranks = [start(first + number, number, command) for number in range(count)]
    try:
        return watch(host, first, ranks)
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
