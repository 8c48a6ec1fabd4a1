"""Times what engines of several processes call on this machine: gloo's collectives, and messages. Imports torch.

    rank 0   |barrier|= computes =|==== call ====|        |barrier|= computes =| ...
    rank 1   |barrier|== computes ==|== call ====|

As in training, ranks come to a call from computing: not quite at the same time, with other things in their caches, and
its threads are asleep. Without that a call takes half as long. Its time is the mean of the ranks', waiting included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from scipy.optimize import isotonic_regression
from torch import Tensor, nn

from harness.core.cluster import SEND, CallTimes
from harness.launch import forked_ranks
from harness.runtime import collectives

SIZES = (2**6, 2**12, 2**15, 2**18, 2**20, 2**22, 2**24)
"""Bytes of the buffers: a scalar's latency, what layers of small models have, activations, buckets of gradients."""
MEMBERS = (2, 4, 8)
ROUNDS, WARMUP = 9, 1
LARGE = 2**21
"""Bytes from which on a call is timed in every third round: its time varies less."""
WIDTH = 4
"""Bytes of a number."""


@dataclass(frozen=True)
class Call:
    """A call on a buffer of so many bytes."""

    name: str
    size: int
    run: Callable[[], object]


def measure(cores: int, say: Callable[[str], None] = lambda text: None) -> tuple[CallTimes, ...]:
    """Time calls among 2, 4 and 8 processes, those that have a core each; of none where there is one core."""
    found: list[CallTimes] = []
    for members in (number for number in MEMBERS if number <= cores):
        say(f"timing collectives among {members} processes")
        found += forked_ranks.run_on_ranks(members, partial(_timed, _collectives, members), ["cpu"] * members)
    if found:
        say("timing messages between processes")
        found += forked_ranks.run_on_ranks(2, partial(_timed, _messages, 2), ["cpu"] * 2)
    return tuple(found)


def _timed(calls: Callable[[int], list[Call]], members: int) -> list[CallTimes]:
    torch.set_num_threads(1)
    timed, compute = calls(members), _computing()
    own: list[list[float]] = [[] for _ in timed]
    for number in range(WARMUP + ROUNDS):
        for call, seconds in zip(timed, own, strict=True):
            if call.size < LARGE or not number % 3:
                seconds.append(_seconds(call, compute))
    everyones: list[list[list[float]]] = [[] for _ in range(members)]
    dist.all_gather_object(everyones, [seconds[1:] for seconds in own])
    means = [
        statistics.median(map(statistics.fmean, zip(*tries, strict=True))) for tries in zip(*everyones, strict=True)
    ]
    return [_times(name, members, timed, means) for name in dict.fromkeys(call.name for call in timed)]


def _seconds(call: Call, compute: Callable[[], object]) -> float:
    dist.barrier()
    compute()
    start = time.perf_counter()
    call.run()
    return time.perf_counter() - start


def _times(name: str, members: int, timed: list[Call], seconds: list[float]) -> CallTimes:
    """Those of a kind. A larger call takes no less: what it seems to take less is noise, shared by both."""
    own = [(call.size, taken) for call, taken in zip(timed, seconds, strict=True) if call.name == name]
    smooth = isotonic_regression([taken for _, taken in own]).x
    return CallTimes(name, members, tuple(size for size, _ in own), tuple(map(float, smooth)))


def _computing() -> Callable[[], object]:
    """A millisecond of what layers do."""
    layers, images = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()), torch.randn(2, 32, 64, 64)

    def compute() -> Tensor:
        with torch.no_grad():
            return torch.as_tensor(layers(images))

    return compute


def _collectives(members: int) -> list[Call]:
    """torch's own collectives, as libraries call them, on buffers that are shared equally."""
    found = []
    for size in SIZES:
        share = torch.zeros(max(1, size // WIDTH // members))
        whole, other = (share.repeat(members) for _ in range(2))
        own = {
            "all_reduce": partial(dist.all_reduce, whole),
            "reduce_scatter": partial(collectives.reduce_scatter, share, whole),
            "all_gather": partial(collectives.all_gather, whole, share),
            "all_to_all": partial(collectives.all_to_all, other, whole),
        }
        found += [Call(name, whole.nbytes, call) for name, call in own.items()]
    return found


def _messages(members: int) -> list[Call]:
    return [Call(SEND, size, partial(_message, torch.zeros(size, dtype=torch.uint8))) for size in SIZES]


def _message(buffer: Tensor) -> None:
    """A message from rank 0 to rank 1."""
    if dist.get_rank():
        dist.recv(buffer, 0)
    else:
        dist.send(buffer, 1)
