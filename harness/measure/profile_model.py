"""Measures a model layer by layer on a real device, the way a pipeline stage runs it.

Each repeat goes through the whole chain, so that caches and memory are as in training. Call `harness.host.malloc.tune`
at the start of the process, or large tensors cost more here than in a run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from harness.core.model_profile import ModelProfile
from harness.host import devices
from harness.interfaces import Model
from harness.measure.count_model import check_arguments, counted
from harness.measure.layer_chain import Chain, Phase
from harness.nn import dropout
from harness.runtime.training_state import intra_op_threads

THREADS = 1
"""Intra-op threads of one CPU device."""


def measure(
    model: Model,
    micro_batch: int,
    dtype: str,
    device: str,
    repeats: int = 5,
    autocast: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> ModelProfile:
    """The profile of `model` for `micro_batch` samples: seconds are medians of `repeats` after a warm-up.

    `say` gets a line for each of them. All else is what `harness.measure.count_model` counts, on this device. `slowed`
    says whether the machine was busy meanwhile. Raises ValueError for impossible arguments; an error inside a layer
    says which one it was.
    """
    check_arguments(micro_batch, dtype)
    if repeats < 1:
        raise ValueError(f"repeats {repeats} must be at least 1")
    target = torch.device(device)
    cuda = [target] if target.type == "cuda" else []
    with intra_op_threads(THREADS), torch.random.fork_rng(devices=cuda), dropout.keyed(seed=0, step=0, micro_batch=0):
        torch.manual_seed(0)
        chain = Chain(model, micro_batch, getattr(torch, dtype), target, autocast)
        profile = counted(chain, dtype, autocast)
        clock = Clock(target)
        for number in range(1 + repeats):
            say(f"timing layers: round {number + 1} of {1 + repeats}")
            clock.new_repeat()
            chain.step(clock)
    layers = [
        replace(layer, forward_s=clock.seconds(index, "forward"), backward_s=clock.seconds(index, "backward"))
        for index, layer in enumerate(profile.layers)
    ]
    return replace(profile, layers=tuple(layers), source=_source(target), times="measured", slowed=clock.slowed())


class Clock:
    """Observes passes of a chain: seconds by the host's clock on CPU, by events in the stream on CUDA.

    |== layer 0 ==|== layer 1 ... waits for a core ... ==|     the clock's seconds: all;  own seconds: where it computes
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._repeats: list[dict[tuple[int, Phase], Callable[[], float]]] = []
        self._own_s: list[float] = []

    def new_repeat(self) -> None:
        """Start another pass. The first one warms up."""
        self._synchronize()
        self._repeats.append({})
        self._own_s.append(0.0)

    @contextmanager
    def __call__(self, index: int, phase: Phase) -> Iterator[None]:
        if self._cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(torch.cuda.current_stream(self._cuda))
            yield
            end.record(torch.cuda.current_stream(self._cuda))
            self._repeats[-1][index, phase] = lambda: start.elapsed_time(end) / 1e3
        else:
            own_s, start_s = time.thread_time(), time.perf_counter()
            yield
            duration_s = time.perf_counter() - start_s
            self._own_s[-1] += time.thread_time() - own_s
            self._repeats[-1][index, phase] = lambda: duration_s

    def seconds(self, index: int, phase: Phase) -> float:
        """The median over all passes but the first; 0 for what did not run, as the backward pass of an integer."""
        self._synchronize()
        return statistics.median(r[index, phase]() if (index, phase) in r else 0.0 for r in self._repeats[1:])

    def slowed(self) -> float:
        """Ratio of the median pass's time to the quickest one's time on a core; at least 1, the first pass left out.

        On CUDA kernels compute as long as they take, so that only passes that differ are counted.
        """
        self._synchronize()
        passes = [sum(seconds() for seconds in one.values()) for one in self._repeats[1:]]
        own = min(passes if self._cuda else self._own_s[1:])
        return max(1.0, statistics.median(passes) / own) if own else 1.0

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._cuda)


def _source(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else devices.cpu_model()
    return f"measured on {name}, {THREADS} thread{'s' * (THREADS != 1)}, torch {torch.__version__}"
