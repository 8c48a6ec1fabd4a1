"""Engines that go wrong in a given turn, and what of their processes is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from analysis.bench.worker import Entry
from harness.core.plan import Plan
from harness.interfaces import Batch, Model, Session, SessionSpec, StepMetrics

STEPS = 2
"""Of a turn."""


class Stumbling:
    """An engine like `engine`, whose sessions do `what` in turn `at` (0 is the warm-up), in the last rank."""

    def __init__(self, engine: Any, what: Callable[[], object], at: int) -> None:
        self.engine, self.what, self.at = engine, what, at
        self.capabilities = engine.capabilities

    def session(self, model: Model, plan: Plan, spec: SessionSpec) -> AbstractContextManager[Session]:
        return self._opened(self.engine.session(model, plan, spec))

    @contextmanager
    def _opened(self, session: AbstractContextManager[Any]) -> Iterator[Any]:
        with session as opened:
            yield _Session(opened, self)


class _Session:
    def __init__(self, session: Session, owner: Stumbling) -> None:
        self.session, self.owner, self.steps = session, owner, 0

    def step(self, batch: Batch, meter: bool = False) -> StepMetrics:
        last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        if self.steps == STEPS * self.owner.at + STEPS - 1 and last:
            self.owner.what()
        self.steps += 1
        return self.session.step(batch, meter)


def stumbles(entry: Entry, what: Callable[[], object], at: int) -> Entry:
    return replace(entry, engine=Stumbling(entry.engine, what, at))  # type: ignore[arg-type]


def fails() -> None:
    raise ArithmeticError("nothing\nadds up")


def hangs() -> None:
    time.sleep(600)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def alive() -> set[int]:
    """The processes that this one has started, and theirs; of those whose parent is gone, this pytest-xdist worker's.

    Those that have ended and that nobody asks for do not count.
    """
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, group = path.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "ZX" and int(group) == os.getpgrp():
            parents[int(path.parent.name)] = int(parent)
    return {pid for pid in parents if _is_own(pid, parents)}


def _is_own(pid: int, parents: dict[int, int]) -> bool:
    line = [pid]
    while line[-1] in parents and line[-1] != os.getpid():
        line.append(parents[line[-1]])
    if line[-1] == os.getpid():
        return pid != os.getpid()
    try:
        environment = Path(f"/proc/{line[-2] if len(line) > 1 else pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"PYTEST_XDIST_WORKER={os.environ.get('PYTEST_XDIST_WORKER')}".encode() in environment


@contextmanager
def nothing_left(within_s: float = 5.0) -> Iterator[None]:
    """Everything that was started in this context has ended, soon after it."""
    before = alive()
    yield
    deadline = time.monotonic() + within_s
    while (left := alive() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left
