"""The process of a benchmark entry: it runs one session, and forks ranks if the engine has them.

    bench  --"step"-->  process (--fork--> its ranks)
           <--seconds--

A process that fails, hangs or is killed is ended at once, with its ranks: it neither stops nor disturbs the others.
"""

from __future__ import annotations

import math
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch._dynamo  # noqa: F401  optimizers import it: once here, which takes a second, and not in each process
import torch.distributed as dist

from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.host import malloc
from harness.interfaces import Batch, Engine, Model, Session, SessionSpec
from harness.launch.forked_ranks import run_session_on_ranks
from harness.launch.process_group import is_first_rank

PATIENCE_S = 60.0
"""Seconds that a process may take for a turn, or to start."""
Answer = tuple[float, list[int] | None]
"""Seconds of a step, and the most bytes that each device held in it, where that was asked for."""


@dataclass(frozen=True)
class Entry:
    """Work of one process of the benchmark."""

    engine: Engine
    model: Model
    plan: Plan
    spec: SessionSpec
    profile: ModelProfile


class EntryProcess:
    """Runs two steps on each command, of which the second is timed.

    `failed` says when and why it has failed; it is empty if it has not.
    """

    def __init__(self, entry: Entry, batch: Batch) -> None:
        fork = get_context("fork")
        self.pipe, self.far_end = fork.Pipe()
        self.process = fork.Process(target=_serve, args=(entry, batch, self.pipe, self.far_end))
        self.turns = 0
        self.failed = ""

    def __enter__(self) -> EntryProcess:
        self.process.start()
        self.far_end.close()  # now the pipe breaks when the process ends
        self._answer("to begin")
        return self

    def __exit__(self, *error: object) -> None:
        if not self.failed:
            with suppress(OSError):  # it may be gone
                self.pipe.send("")
            self.process.join(5.0)
            self._end()

    def step(self) -> float:
        """Seconds of a step; NaN if it fails, or has failed. The first turn is the warm-up, round 1 is the next."""
        answer = self._ask("step", f"in round {self.turns}" if self.turns else "in its warm-up")
        self.turns += 1
        return answer[0] if answer else math.nan

    def peak_bytes(self) -> list[int] | None:
        """The most that each device held in a step; None if the engine does not count it, or it fails."""
        answer = self._ask("meter", "in the step that counts memory")
        return answer[1] if answer else None

    def _ask(self, command: str, when: str) -> Answer | None:
        if self.failed:
            return None
        with suppress(OSError):  # it is gone, which `_answer` reports
            self.pipe.send(command)
        return self._answer(when)

    def _answer(self, when: str) -> Answer | None:
        """Return its answer; None if it fails."""
        try:
            answer: Answer | str = self.pipe.recv() if self.pipe.poll(PATIENCE_S) else f"no answer in {PATIENCE_S:g} s"
        except (EOFError, OSError):
            self.process.join(1.0)
            answer = f"it ended with exit code {self.process.exitcode}"
        if not isinstance(answer, str):
            return answer
        self.failed = f"failed {when}: {answer}"
        self._end()
        return None

    def _end(self) -> None:
        self.process.kill()  # its ranks go with it
        self.process.join()
        self.pipe.close()


def _serve(entry: Entry, batch: Batch, bench: Connection, pipe: Connection) -> None:
    """The main function of the process."""
    bench.close()  # now the pipe breaks when the bench ends

    def loop(session: Session) -> None:
        reports = is_first_rank()
        if reports:
            pipe.send((0.0, None))
        while command := _next_command(pipe, reports):
            session.step(batch)  # what it works on is in the caches again, as in training
            metrics = session.step(batch, meter=command == "meter")
            if reports:
                pipe.send((metrics.step_time_s, metrics.peak_memory_bytes))

    malloc.tune(entry.profile.largest_bytes)
    try:
        session, can = entry.engine.session(entry.model, entry.plan, entry.spec), entry.engine.capabilities
        if can.multi_process:
            run_session_on_ranks(session, loop, entry.plan.mesh.size, entry.spec.devices, can.mpi)
        else:
            with session as entered:
                loop(entered)
    except Exception as error:
        traceback.print_exc()
        with suppress(OSError):  # the bench may be gone
            pipe.send(" ".join(f"{type(error).__name__}: {error}".split()))


def _next_command(pipe: Connection, reports: bool) -> str:
    """The next command, in all ranks."""
    command = [pipe.recv() if reports else ""]
    if dist.is_initialized():
        dist.broadcast_object_list(command)
    return str(command[0])
