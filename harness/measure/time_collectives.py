"""Times collectives among ranks on the local devices: gloo on CPU, NCCL on GPUs. Imports torch.

    round 1                                         round 2
    all_reduce 4 KiB, 16 KiB, ...  all_gather ...   all_reduce 4 KiB, ...

Every round times everything, so that a disturbance of some seconds spoils some timings of each and not all of one; the
median of all counts. A timing begins when a barrier has been passed and ends when the last rank is done.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from harness.launch import forked_ranks
from harness.launch.process_group import is_first_rank
from harness.measure.alpha_beta_fit import Timing
from harness.measure.calibration_result import Timings
from harness.runtime import collectives, direct_collectives
from harness.simulator.routes import STEPS

SMALLEST, LARGEST = 2**12, {"cpu": 2**26, "cuda": 2**28}
"""Bytes of the messages; in between they grow fourfold."""
SMALL, TRIES = 2**20, 4
"""Messages of up to so many bytes are timed so often in a round: they are short, and their times scatter most."""
ELEMENT_BYTES = 4


@dataclass(frozen=True)
class _Call:
    """One timed collective of one size."""

    name: str
    size: int
    run: Callable[[], object]

    @property
    def tries(self) -> int:
        return TRIES if self.size <= SMALL else 1


def measure(
    devices: Sequence[str],
    rounds: int,
    warmup: int,
    say: Callable[[str], None] = lambda text: None,
    sizes: Sequence[int] | None = None,
) -> Timings:
    """Time all collectives among 2, 3, 4, 8, 16 ... and all of these torch devices, after `warmup` rounds.

    `say` gets a line for each round. `sizes` are bytes, each rounded down to what the members can share equally.
    """
    kind = torch.device(devices[0]).type
    wanted = message_sizes(LARGEST[kind]) if sizes is None else sizes
    found: list[Timing] = []
    for members in group_sizes(len(devices)):

        def work(members: int = members) -> list[Timing]:
            return _timed(torch.device(devices[dist.get_rank()]), members, wanted, rounds, warmup, say)

        found += forked_ranks.run_on_ranks(members, work, devices)
    return Timings("nccl" if kind == "cuda" else "gloo", rounds, tuple(found))


def group_sizes(devices: int) -> list[int]:
    """2, 3, 4, 8, 16 and so on, and all devices."""
    powers = [2**exponent for exponent in range(1, devices.bit_length()) if 2**exponent <= devices]
    return sorted({*powers, *([3] if devices > 3 else []), devices})


def message_sizes(largest: int) -> list[int]:
    """Bytes from `SMALLEST` to `largest`, fourfold each."""
    sizes = [SMALLEST]
    while sizes[-1] * 4 <= largest:
        sizes.append(sizes[-1] * 4)
    return sizes


def _timed(
    device: torch.device, members: int, sizes: Sequence[int], rounds: int, warmup: int, say: Callable[[str], None]
) -> list[Timing]:
    """Return this rank's timings: for each collective the median over rounds of the slowest rank's time."""
    calls = _calls(device, members, sizes)
    seconds: list[list[float]] = [[] for _ in calls]
    for number in range(warmup + rounds):
        if is_first_rank():
            say(f"{members} ranks: round {number + 1} of {warmup + rounds}")
        for call, taken in zip(calls, seconds, strict=True):
            tries = [_seconds(device, call) for _ in range(call.tries)]
            taken += tries if number >= warmup else []
    return [_timing(call, members, taken) for call, taken in zip(calls, _slowest(seconds), strict=True)]


def _calls(device: torch.device, members: int, sizes: Sequence[int]) -> list[_Call]:
    """Every collective on every size, in buffers that they share."""
    unit = members * ELEMENT_BYTES
    counts = [max(1, size // unit) * members for size in sizes]
    whole, other = (torch.full((max(counts),), 0.0, device=device) for _ in range(2))  # written: memory is there
    return [
        _Call(name, count * ELEMENT_BYTES, _collective(name, whole[:count], other[:count], members))
        for name in STEPS
        for count in counts
    ]


def _collective(name: str, whole: Tensor, other: Tensor, members: int) -> Callable[[], object]:
    """Return a call of the collective. `whole` is the buffer whose bytes count: a reduce_scatter's input, an
    all_gather's output."""
    share = other[: len(other) // members]
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: direct_collectives.reduce_scatter(share, whole),
        "all_gather": lambda: direct_collectives.all_gather(whole, share),
        "all_to_all": lambda: collectives.all_to_all(other, whole),
    }[name]


def _seconds(device: torch.device, call: _Call) -> float:
    """Time a call by this rank's clock, from a barrier until its device has finished."""
    dist.barrier()
    _finish(device)
    start = time.perf_counter()
    call.run()
    _finish(device)
    return time.perf_counter() - start


def _slowest(seconds: list[list[float]]) -> list[list[float]]:
    """The largest of all ranks, timing by timing."""
    longest = torch.tensor([one for taken in seconds for one in taken], dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return [part.tolist() for part in longest.split([len(taken) for taken in seconds])]


def _timing(call: _Call, members: int, seconds: list[float]) -> Timing:
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive") if seconds[1:] else seconds * 3
    return Timing(call.name, members, call.size, median, (low, high))


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
