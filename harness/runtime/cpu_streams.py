"""CPU devices that behave like CUDA streams: each job queue has a thread, and the host never waits to issue work.

    host      issue a, b, c                       (returns at once)
    queue 0    |--a--|       |--c--|               c waits for b, which runs on another queue
    queue 1          |--b--|

PyTorch's autograd runs CPU work in the thread that calls it, so work on several CPU devices overlaps only if each
device has a thread of its own.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import torch

from harness.core.op import Op, Queue
from harness.core.trace import Span

Context = Callable[[], AbstractContextManager[object]]


class Run:
    """Jobs that belong together: their spans, and the first error of any, after which the others are skipped."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.error: BaseException | None = None
        self.lock = threading.Lock()

    def fail(self, error: BaseException) -> None:
        """Remember the first error only."""
        with self.lock:
            self.error = self.error or error

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error


@dataclass(eq=False)
class Job:
    """Work for a job queue. It starts when it is first in the queue and every job in `after` has ended.

    Once its run has failed it is skipped, unless it is there for `always`.
    """

    run: Run
    work: Callable[[], None]
    op: Op | None = None
    after: Sequence[Job] = ()
    always: bool = False
    ended: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Block the calling thread until the job has ended (by running, failing or being skipped)."""
        self.ended.wait()


class JobQueue:
    """A queue of a device (compute or copies): a daemon thread that executes jobs in the order of their submission.

    `context` is entered around every job (the device's memory meter).
    """

    def __init__(self, device: int, name: Queue, context: Context = nullcontext) -> None:
        self.device = device
        self.name = name
        self.context = context
        self.op: Op | None = None
        """What the queue runs now."""
        self._closed = False
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=f"device {device} {name}", daemon=True)
        threads = torch.get_num_threads()
        self._ready = threading.Event()
        self._thread.start()
        self._ready.wait()
        torch.set_num_threads(threads)  # the queue's own setting became the default of other threads
        _open_queues.add(self)

    def submit(self, job: Job) -> Job:
        """Queue a job; raises RuntimeError once the queue is closed."""
        if self._closed:
            raise RuntimeError(f"device {self.device} is closed: its pipeline's close() was called")
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """End the thread once its queue is empty."""
        self._closed = True
        self._jobs.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end, but not for ever."""
        self._thread.join(timeout_s)

    def span(self, op: Op, start_s: float, end_s: float) -> Span:
        return Span(str(op), self.device, self.name, start_s, end_s)

    def _loop(self) -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # a thread's first use of its number takes it from the process: have it now
        self._ready.set()
        while (job := self._jobs.get()) is not None:
            self._execute(job)
            del job

    def _execute(self, job: Job) -> None:
        for earlier in job.after:
            earlier.wait()
        start = time.perf_counter()
        self.op = job.op
        try:
            if job.always or job.run.error is None:
                with self.context():
                    job.work()
                if job.op is not None:
                    job.run.spans.append(self.span(job.op, start, time.perf_counter()))
        except BaseException as error:
            job.run.fail(error)
        finally:
            self.op = None
            job.after, job.work, job.run = (), nothing, _OVER  # else they would live as long as the job
            job.ended.set()


def running() -> list[Op]:
    """What the queues of this process run now."""
    return [op for queue in list(_open_queues) if (op := queue.op)]


def submit_together(places: Sequence[tuple[JobQueue, Op | None]], job: Job) -> Job:
    """Run `job` so that it occupies several queues at once, with an op on each: as a copy on the default streams
    of two devices does, or a collective.

    queue 0  |--x--|      |#copy#|
    queue 1  |----y---||#copy#|        it starts when all have come to it
    """
    work, run = job.work, job.run
    arrived = [threading.Event() for _ in places[1:]]

    def together() -> None:
        for event in arrived:
            event.wait()
        start = time.perf_counter()
        work()
        end = time.perf_counter()
        run.spans += [queue.span(op, start, end) for queue, op in places if op is not None]

    def hold(event: threading.Event) -> None:
        event.set()
        job.wait()

    job.op, job.work = None, together
    with _together:  # queues get such jobs in one order, or they would wait for each other
        for (queue, _), event in zip(places[1:], arrived, strict=True):
            queue.submit(Job(run, partial(hold, event), always=True))
        return places[0][0].submit(job)


def nothing() -> None:
    """The work of a job that is only waited for."""


_OVER = Run()
_together = threading.Lock()


_open_queues: weakref.WeakSet[JobQueue] = weakref.WeakSet()
_SHUTDOWN_S = 2.0


@atexit.register
def _close_open_queues() -> None:
    """A thread that is inside torch while the interpreter goes away would abort the process."""
    queues = list(_open_queues)
    for queue in queues:
        queue.close()
    deadline = time.monotonic() + _SHUTDOWN_S
    for queue in queues:
        queue.join(max(0.0, deadline - time.monotonic()))
