"""Measures a model layer by layer on a real device, the way a pipeline stage runs it.

Each repeat goes through the whole chain, so that caches and memory are as in training. Call `harness.host.malloc.tune`
at the start of the process, or large tensors cost more here than in a run.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple, get_args

import torch
from scipy.optimize import brentq

from harness.core.model_profile import LayerProfile, ModelProfile
from harness.host import devices
from harness.interfaces import Model
from harness.measure import work_together
from harness.measure.count_model import check_arguments, counted
from harness.measure.layer_chain import WHOLE, Chain, Phase
from harness.measure.reference_work import Pace
from harness.nn import dropout
from harness.runtime.memory_meter import Meter
from harness.runtime.training_state import intra_op_threads

Key = tuple[int, Phase]
THREADS = 1
"""Intra-op threads of one CPU device."""
WARM_UPS = {"cpu": 1, "cuda": 3}
"""Passes that do not count: a GPU loads kernels, chooses among them, and raises its clock."""
QUIET_PACE, MOST_ROUNDS = 1.15, 3
"""Of a round that counts known work takes no more times as long; at most so many times as many rounds as wanted."""
AHEAD, CYCLES_S = 1.5, 2e9
"""A GPU begins a pass so many times as late as the host took to issue the last one; its cycles in a second."""
SHORT_S, MOST_PASSES, KEPT = 5e-3, 8, 0.1
"""Cuts between layers take some 50 µs each, so that those of longer layers do not count. Passes without cuts take about
so long, and are no more. A layer keeps this share of its time."""


def measure(
    model: Model,
    micro_batch: int,
    dtype: str,
    device: str,
    repeats: int = 5,
    autocast: str | None = None,
    say: Callable[[str], None] = lambda text: None,
    channels_last: bool = False,
    reference_s: float = 0.0,
    twice: bool = False,
    halves: bool = False,
    compiled: bool = False,
) -> ModelProfile:
    """The profile of `model` for `micro_batch` samples: seconds are medians of `repeats` rounds after a warm-up,
    of more those in which the machine was quickest.

    `say` gets a line for each of them. All else is what `harness.measure.count_model` counts, on this device. `slowed`
    says whether the machine was busy meanwhile: by threads that waited for a core, and by work that takes `reference_s`
    on a quiet CPU (`harness.measure.reference_work`; 0: not known). With `twice` there is room for a second copy, and
    `lock_share` is measured on two threads; with `halves` what the layers take for fewer samples, too. Raises
    ValueError for impossible arguments; an error inside a layer says which one it was.
    """
    check_arguments(micro_batch, dtype)
    if repeats < 1:
        raise ValueError(f"repeats {repeats} must be at least 1")
    target = torch.device(device)
    cuda = [target] if target.type == "cuda" else []
    with intra_op_threads(THREADS), torch.random.fork_rng(devices=cuda), dropout.keyed(seed=0, step=0, micro_batch=0):
        pace = Pace(0.0 if cuda else reference_s)
        torch.manual_seed(0)
        make = partial(
            Chain,
            model,
            dtype=getattr(torch, dtype),
            device=target,
            autocast=autocast,
            channels_last=channels_last,
            compiled=compiled,
        )
        chain = make(micro_batch=micro_batch)
        profile = counted(chain, dtype, autocast)
        clock = Clock(target)
        slowed = _timed(chain, clock, pace, repeats, say)
        fewer = _of_fewer(make, micro_batch, target, pace, repeats, say) if halves else None
        slowed = max(slowed, fewer.slowed if fewer else 1.0)
        share = 0.0
        if twice and not cuda:
            say("timing layers on two threads")
            share = work_together.lock_share(_pass(chain), _pass(make(micro_batch=micro_batch)))
        grown = _grown_bytes(chain) if not cuda and not compiled else [0] * len(profile.layers)
    layers = _with_times(profile.layers, clock, fewer)
    layers = tuple(replace(layer, backward_bytes=size) for layer, size in zip(layers, grown, strict=True))
    slowed = max(clock.slowed(), slowed)
    return replace(profile, layers=layers, source=_source(target), times="measured", slowed=slowed, lock_share=share)


def _grown_bytes(chain: Chain) -> list[int]:
    """By how much the memory grows in each layer's backward pass, on a CPU device: what kernels allocate inside
    included."""
    meter, grown = Meter(), [0] * len(chain.layers)
    meter.add_static([*chain.layers.parameters(), *chain.layers.buffers()])
    meter.add_static(one.grad for one in chain.layers.parameters() if one.grad is not None)

    @contextmanager
    def observer(index: int, phase: Phase) -> Iterator[None]:
        meter.reset_peak()
        before = meter.live_bytes
        yield
        if phase == "backward":
            grown[index] = meter.peak_bytes - before

    with meter:
        chain.step(observer)
    return grown


def _timed(chain: Chain, clock: Clock, pace: Pace, repeats: int, say: Callable[[str], None]) -> float:
    """Time the layers of a chain for `repeats` quiet rounds; returns by how much other programs slowed these."""
    paces = [pace.look()]
    while not _enough(paces[clock.warm_ups :], repeats):
        say(f"timing layers: round {len(paces)}")
        clock.new_repeat()
        chain.step(clock)
        for _ in range(clock.passes_without_cuts(len(chain.layers))):
            chain.whole(clock)
        paces.append(pace.look())
    return clock.keep_quickest(paces, repeats)


class Fewer(NamedTuple):
    """The layers' times for a `share` of the samples, and by how much other programs slowed them."""

    share: float
    clock: Clock
    slowed: float


def _of_fewer(
    make: Callable[..., Chain], samples: int, device: torch.device, pace: Pace, repeats: int, say: Callable[[str], None]
) -> Fewer | None:
    """The layers' times for half of the samples. None for a single sample, and where a layer cannot take fewer: a batch
    norm of one number, a layer with a fixed batch size."""
    half = samples // 2
    if not half:
        return None
    say(f"timing layers for {half} of {samples} samples")
    clock = Clock(device)
    try:
        slowed = _timed(make(micro_batch=half), clock, pace, repeats, say)
    except Exception as error:  # a layer may raise anything; the model itself has just run
        say(f"layers cannot be timed for {half} of {samples} samples: {type(error).__name__}: {error}")
        return None
    return Fewer(half / samples, clock, slowed)


def _with_times(layers: Sequence[LayerProfile], clock: Clock, fewer: Fewer | None) -> tuple[LayerProfile, ...]:
    times = [clock.layers(len(layers), phase) for phase in get_args(Phase)]
    fixed = [[0.0] * len(layers)] * len(times)
    if fewer:
        fixed = [
            fixed_parts(whole, fewer.clock.layers(len(layers), phase), fewer.share)
            for whole, phase in zip(times, get_args(Phase), strict=True)
        ]
    return tuple(
        replace(layer, forward_s=forward_s, backward_s=backward_s, forward_fixed=forward, backward_fixed=backward)
        for layer, forward_s, backward_s, forward, backward in zip(layers, *times, *fixed, strict=True)
    )


def fixed_parts(whole_s: Sequence[float], fewer_s: Sequence[float], share: float) -> list[float]:
    """The part of each layer's time that does not depend on the samples, by its times for all of them and for a
    `share`. Errors of single layers, of which none has less than no part, do not add up: the parts of all are right in
    the sum."""

    def fixed_s(whole: float, fewer: float) -> float:
        return (fewer - share * whole) / (1 - share)

    each = [min(max(0.0, fixed_s(*both)), both[0]) for both in zip(whole_s, fewer_s, strict=True)]
    wanted, found = max(0.0, fixed_s(sum(whole_s), sum(fewer_s))), sum(each)
    part = min(1.0, wanted / found) if found else 0.0
    return [part * seconds / whole if whole else 0.0 for seconds, whole in zip(each, whole_s, strict=True)]


def _enough(paces: Sequence[float], repeats: int) -> bool:
    """Whether there are as many rounds as wanted in which the machine was quiet, or far more in all: `paces` are those
    before the first and after each round."""
    quiet = sum(max(around) <= QUIET_PACE for around in pairwise(paces))
    return quiet >= repeats or len(paces) > MOST_ROUNDS * repeats


def _pass(chain: Chain) -> Callable[[], None]:
    """A pass of a chain in a thread of its own, which nobody observes."""

    def once() -> None:
        with dropout.keyed(seed=0, step=0, micro_batch=0):
            chain.step(lambda index, phase: nullcontext())

    return once


class Clock:
    """Observes passes of a chain: seconds by the host's clock on CPU, by events in the stream on CUDA.

    |== layer 0 ==|== layer 1 ... waits for a core ... ==|     the clock's seconds: all;  own seconds: where it computes

    A GPU begins late, so that no layer waits for the host there; the host's seconds are kept next to its own ones. In
    training the slower of both counts: of small layers the host's.

    host  | issue 0 | issue 1 |                 GPU  | sleeps             |= layer 0 =|= layer 1 =|
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self.warm_ups = WARM_UPS[device.type]
        self._repeats: list[dict[Key, Callable[[], float]]] = []
        self._host: list[dict[Key, float]] = []
        self._own_s: list[float] = []
        self._passes: dict[Phase, list[dict[int, float]]] = {}

    def new_repeat(self) -> None:
        """Start another pass. The first ones warm up."""
        self._synchronize()
        if self._cuda and self._host:
            torch.cuda._sleep(int(AHEAD * sum(self._host[-1].values()) * CYCLES_S))
        self._repeats.append({})
        self._host.append({})
        self._passes.clear()
        self._own_s.append(0.0)

    @contextmanager
    def __call__(self, index: int, phase: Phase) -> Iterator[None]:
        own_s, start_s = time.thread_time(), time.perf_counter()
        if self._cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(torch.cuda.current_stream(self._cuda))
            yield
            end.record(torch.cuda.current_stream(self._cuda))
            self._repeats[-1][index, phase] = lambda: start.elapsed_time(end) / 1e3
            self._host[-1][index, phase] = time.perf_counter() - start_s
        else:
            yield
            duration_s = time.perf_counter() - start_s
            computed_s = time.thread_time() - own_s
            self._own_s[-1] += computed_s if index != WHOLE else 0.0
            self._repeats[-1][index, phase] = lambda: duration_s

    def keep_quickest(self, paces: Sequence[float], rounds: int) -> float:
        """Forget all rounds but those in which the machine was quickest, of the ones that count. Returns the median of
        their paces, which were looked at before the first and after each round: at least 1."""
        self._synchronize()
        own = [max(around) for around in pairwise(paces)][self.warm_ups :]
        kept = sorted(sorted(range(len(own)), key=own.__getitem__)[:rounds])
        places = [*range(self.warm_ups), *(self.warm_ups + number for number in kept)]
        self._repeats, self._host = [self._repeats[n] for n in places], [self._host[n] for n in places]
        self._own_s = [self._own_s[n] for n in places]
        self._passes.clear()
        return max(1.0, statistics.median(own[number] for number in kept))

    def seconds(self, index: int, phase: Phase) -> float:
        """The median over all passes that count; 0 for what did not run, as the backward pass of an integer."""
        if phase not in self._passes:
            self._synchronize()
            passes = zip(self._repeats[self.warm_ups :], self._host[self.warm_ups :], strict=True)
            self._passes[phase] = [_slower(seconds, host, phase) for seconds, host in passes]
        return statistics.median(one.get(index, 0.0) for one in self._passes[phase])

    def passes_without_cuts(self, layers: int) -> int:
        """How many passes the last one shall have after it that are not cut, of which the last one counts: none where
        its layers are long, and some where all are short, since the micro-batches of a step follow one another. None
        on CUDA, where kernels take what they take."""
        pass_s = _total_s(self._repeats[-1]) if not self._cuda else math.inf
        return 0 if pass_s >= 2 * layers * SHORT_S else min(MOST_PASSES, 1 + int(SHORT_S / max(pass_s, 1e-9)))

    def layers(self, count: int, phase: Phase) -> list[float]:
        """The seconds of the layers: as one by one, without what the cuts take if all of them ran as one task, too."""
        seconds = [self.seconds(index, phase) for index in range(count)]
        return without_cuts(seconds, self.seconds(WHOLE, phase))

    def slowed(self) -> float:
        """Ratio of the median pass's time to the quickest one's time on a core; at least 1, the first pass left out.

        On CUDA kernels compute as long as they take, so that only passes that differ are counted.
        """
        self._synchronize()
        passes = [_total_s(one) for one in self._repeats[self.warm_ups :]]
        own = min(passes if self._cuda else self._own_s[self.warm_ups :])
        return max(1.0, statistics.median(passes) / own) if own else 1.0

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._cuda)


def _total_s(one: Mapping[Key, Callable[[], float]]) -> float:
    """Seconds of the layers of a pass, one by one."""
    return sum(seconds() for (index, _), seconds in one.items() if index != WHOLE)


def without_cuts(seconds: Sequence[float], whole_s: float) -> list[float]:
    """Times of layers that ran one by one, each less by the same, so that they add up to `whole_s`, what all of them
    take as one task: each call of a layer, and each of autograd, costs its own. Small ones keep `KEPT` of theirs.
    0, or a longer time, changes nothing."""

    def less(each_s: float) -> list[float]:
        return [max(KEPT * one, one - each_s) for one in seconds]

    if not KEPT * sum(seconds) < whole_s < sum(seconds):
        return list(seconds)
    return less(brentq(lambda each_s: sum(less(each_s)) - whole_s, 0.0, max(seconds), xtol=1e-12))


def _slower(device: dict[Key, Callable[[], float]], host: dict[Key, float], phase: Phase) -> dict[int, float]:
    """The seconds of the layers in one pass: of the device or of the host, whichever takes longer for all of them."""
    seconds = {index: found() for (index, one), found in device.items() if one == phase}
    issued = {index: found for (index, one), found in host.items() if one == phase}
    return max(seconds, issued, key=lambda times: sum(times.values()))


def _source(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else devices.cpu_model()
    return f"measured on {name}, {THREADS} thread{'s' * (THREADS != 1)}, torch {torch.__version__}"
