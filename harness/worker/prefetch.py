"""Loading ahead: a thread makes the next batch while a step runs.

    training     | wait 0 |  step 0  |  step 1  |wait 2|  step 2  |
    loader       |batch 0 | batch 1 |    | batch 2     | batch 3 |       never more than one batch ahead

Importing this module imports torch.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from harness.interfaces import Batch, Data
from harness.runtime.graphed_layers import CAPTURE
from harness.runtime.values import mapped

SHUTDOWN_S = 2.0
"""Seconds that the end of training, after an error, waits for a batch that is being made."""


class Loader:
    """The batches of `steps`, each with the seconds that training waited for it. To be used once:

        with Loader(data, size, steps) as batches:
            for batch, waited_s in batches: ...

    The thread computes with one intra-op thread, and pins batches for GPUs. No batch is made that is not asked for:
    after the last step there is none, after an error or an interrupt in a step at most the next one. An error of `data`
    comes out here, with its own traceback and a note of the step. Meanwhile a step draws from torch's global random
    generator: `data` must not.
    """

    def __init__(self, data: Data, size: int, steps: range) -> None:
        self._data = data
        self._size = size
        self._steps = steps
        self._wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._made: queue.SimpleQueue[Batch | BaseException] = queue.SimpleQueue()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="loader", daemon=True)

    def __enter__(self) -> Iterator[tuple[Batch, float]]:
        threads = torch.get_num_threads()
        self._thread.start()
        self._ready.wait()
        torch.set_num_threads(threads)  # the loader's own setting became the default of other threads
        return self._batches()

    def __exit__(self, *error: object) -> None:
        self._wanted.put(None)
        self._thread.join(SHUTDOWN_S)

    def _batches(self) -> Iterator[tuple[Batch, float]]:
        for step in self._steps:
            began = time.perf_counter()
            if step == self._steps[0]:
                self._wanted.put(step)
            made = self._made.get()
            waited_s = time.perf_counter() - began
            if isinstance(made, BaseException):
                raise made
            if step + 1 in self._steps:
                self._wanted.put(step + 1)
            yield made, waited_s

    def _loop(self) -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # a thread's first use of its number takes it from the process: have it now
        self._ready.set()
        while (step := self._wanted.get()) is not None:
            self._made.put(self._make(step))

    def _make(self, step: int) -> Batch | BaseException:
        try:
            batch = self._data.batch(step, self._size)
            return _pinned(batch) if torch.cuda.is_initialized() else batch
        except BaseException as error:
            error.add_note(f"in making the batch of step {step}")
            return error


def _pinned(batch: Batch) -> Batch:
    """The batch in memory from which a GPU takes it while the host goes on."""
    with CAPTURE:
        return Batch(mapped(Tensor.pin_memory, batch.inputs), mapped(Tensor.pin_memory, batch.targets))
