"""Commands that run one after the other or several at a time, each with a log; a failure ends none of the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path

from harness.config import registry
from harness.core import units
from harness.launch import die_with_parent

POLL_S = 0.1
GRACE_S = 120
"""Seconds that a command has to end after Ctrl-C, before it is killed."""


@dataclass(frozen=True)
class Job:
    """Arguments of Python, whose end is reported under `name`; `full`: only if there is time for all.

    `environment` is in addition to that of this process. After `limit_s` seconds the job is ended.
    """

    name: str
    arguments: tuple[str, ...]
    full: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    limit_s: float = float("inf")


@dataclass(frozen=True)
class Ended:
    """How a job ended: "ok", or what went wrong. `log` has what it printed."""

    job: Job
    how: str
    seconds: float
    log: Path

    @property
    def ok(self) -> bool:
        return self.how == "ok"


def run(jobs: Iterable[Job], at_once: int, logs: Path) -> list[Ended]:
    """Run the jobs, so many at a time, and print the end of each.

    Ctrl-C ends them all, in order: each gets it, too.
    """
    logs.mkdir(parents=True, exist_ok=True)
    stop = threading.Event()
    with ThreadPoolExecutor(at_once) as pool:
        try:
            return list(pool.map(_run, jobs, repeat(logs), repeat(stop)))
        except KeyboardInterrupt:
            stop.set()
            raise


def log_of(job: Job, logs: Path) -> Path:
    """Return the file that gets what a job prints."""
    return logs / f"{job.name.replace(' ', '_')}.log"


def _run(job: Job, logs: Path, stop: threading.Event) -> Ended:
    """Run a job. It is ended, or not begun, where it is to `stop`."""
    log, began_s = log_of(job, logs), time.monotonic()
    if stop.is_set():
        return Ended(job, "not begun", 0.0, log)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*die_with_parent.prefix(), sys.executable, *job.arguments],
            cwd=registry.ROOT,
            env=os.environ | job.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        how = _how_it_ended(process, job, began_s, stop)
    seconds = time.monotonic() - began_s
    print(f"{job.name:<28} {units.seconds(seconds):>9}   {how}{'' if how == 'ok' else f', see {log}'}", flush=True)
    return Ended(job, how, seconds, log)


def _how_it_ended(process: subprocess.Popen[bytes], job: Job, began_s: float, stop: threading.Event) -> str:
    while (code := process.poll()) is None:
        late = time.monotonic() - began_s > job.limit_s
        if late or stop.wait(POLL_S):
            process.send_signal(signal.SIGINT)
            try:
                code = process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            if late:
                return f"not ended within {units.seconds(job.limit_s)}"
            break
    return "ok" if code == 0 else f"ended with {code}"
