"""Measures this machine for `harness.host.machine`, as pipelines use it: CPU devices are job queues, GPUs have streams.

Others may use the machine, too: most figures are the best of several tries.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from harness.config.schema import AUTOCAST, DTYPES
from harness.core.cluster import CallTimes, Device, Link
from harness.core.op import Op
from harness.core.problem import CannotRun, Problem
from harness.host import devices, machine
from harness.host.devices import DetectedDevices
from harness.host.machine import Machine
from harness.measure import reference_work, time_calls, work_together
from harness.runtime.cpu_streams import Job, JobQueue, Run
from harness.runtime.training_state import intra_op_threads

Timer = Callable[[Callable[[], object], int], float]
"""Seconds of one call of a function, the mean of so many calls in a row."""
Say = Callable[[str], None]

BUDGET_S = 0.25
"""Time budget for each figure, in seconds."""
TRY_S = 0.05
"""Seconds: a matmul grows until it takes this long."""
SMALL, LARGEST = 256, {"cpu": 2048, "cuda": 8192}
"""Rows of the square matrices that are multiplied."""
SUM_BYTES = {"cpu": 64 * 2**20, "cuda": 256 * 2**20}
"""Bytes of each tensor in the bandwidth test: more than caches hold."""
MESSAGES_BYTES = (4 * 2**10, 8 * 2**20)
"""A message that shows the latency of a link, and one of the size of activations, which shows its bandwidth."""
MESSAGES = 20
KERNELS = 500


def measure(
    wanted: str = "auto", say: Say = lambda text: None, processes: bool = True, known: Machine | None = None
) -> Machine:
    """Measure the devices of kind `wanted` ("auto", "cpu" or "cuda"), which takes some seconds.

    With `processes` that is also what CPU devices do where each is a process; of a machine that is `known` nothing else
    is measured. `say` gets a line for each figure. Best in a process of its own that called `harness.host.malloc.tune`,
    as ranks do. Raises ValueError without such devices.
    """
    found = devices.detect(wanted)
    if not found.count:
        raise ValueError("there is no GPU that torch can use: cluster.device=cpu")
    return _gpus(found, say) if found.kind == "cuda" else _cpu(found, say, processes, known)


def whole(kind: str = "auto") -> Machine:
    """This machine as far as it is cached, the rest measured now, as by `measure`."""
    known = machine.stored(kind)
    return known if known and known.knows_processes else measure(kind, known=known)


# -- CPU devices: each is a thread that computes with one intra-op thread ----------------------------------------------


def _cpu(found: DetectedDevices, say: Say, processes: bool, known: Machine | None) -> Machine:
    cores = devices.cores()
    calls, process_cores = _processes(cores, say) if processes else ((), 0.0)  # it forks: before torch has threads
    if known:
        return replace(known, process_cores=process_cores, calls=calls)
    with intra_op_threads(1), work_together.queues_of_devices(max(2, cores)) as queues:
        device = _device(found, "cpu", _wall, say)
        say("timing messages")
        link = _fitted([_message_s(queues[0], queues[1], size) for size in MESSAGES_BYTES])
        reference_s = reference_work.quickest_s()
        say("timing all cores together")
        threads = work_together.threads_together(queues[:cores])
    return Machine(device, link, None, threads, process_cores, calls, reference_s)


def _processes(cores: int, say: Say) -> tuple[tuple[CallTimes, ...], float]:
    """What processes call, and how many cores' worth of work they do at once."""
    calls = time_calls.measure(cores, say)
    if cores == 1:
        return calls, 1.0
    say("timing processes on all cores")
    return calls, work_together.processes_together(cores)


def _wall(work: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - start) / calls


def _message_s(source: JobQueue, target: JobQueue, size: int) -> float:
    """Time from the end of the task that makes a tensor to the end of its copy on the other queue.

    source  |--0F0--|
    target          |..|1copy0<0|
                    |<--------->|
    """
    made = torch.zeros(size // 4)
    taken: list[Tensor] = []
    seconds = []

    def make() -> None:
        made.add_(1)

    def take() -> None:
        taken.append(made.clone())

    for _ in range(MESSAGES):
        run = Run()
        task = source.submit(Job(run, make, Op(0, "F", 0)))
        copy = Op(1, "copy", 0, peer=0)
        target.submit(Job(run, take, copy, after=(task,))).wait()
        run.raise_error()
        ends = {span.op: span.end_s for span in run.spans}
        seconds.append(ends[str(copy)] - ends["0F0"])
        taken.clear()
    return statistics.quantiles(seconds, n=4)[0]


# -- GPUs --------------------------------------------------------------------------------------------------------------


def _gpus(found: DetectedDevices, say: Say) -> Machine:
    others_bytes = devices.gpu_used_bytes()
    refuse_without_kernels(found.name, torch.cuda.get_device_capability(0), torch.cuda.get_arch_list())
    say("timing copies")
    host = _fitted([_host_copy_s(size) for size in MESSAGES_BYTES])
    link = _fitted([_peer_copy_s(size) for size in MESSAGES_BYTES]) if found.count > 1 else host
    device = _device(found, "cuda:0", _events, say)
    left_bytes = min(device.memory_bytes, _left_for_tensors(others_bytes))
    return Machine(replace(device, memory_bytes=left_bytes), link, host)


def refuse_without_kernels(name: str, capability: tuple[int, int], built: Sequence[str]) -> None:
    """Raise CannotRun if the installed torch has no kernels for a GPU of this compute capability.

    `built` is what torch was compiled for: "sm_80" runs on 8.0 and later ones of the same generation, "compute_90" on
    9.0 and all later ones.
    """
    for kind, _, number in (target.partition("_") for target in built):
        digits = re.match(r"\d+", number)
        least = divmod(int(digits[0]), 10) if digits else (sys.maxsize, 0)
        if least <= capability and (kind == "compute" or least[0] == capability[0]):
            return
    message = f"{name} has compute capability {capability[0]}.{capability[1]}, torch is built for {', '.join(built)}"
    hint = "a torch that is built for this GPU: PIP_ARGS of make setup"
    raise CannotRun([Problem("cluster.device", "cuda", message, ({"cluster.device": "cpu"},), hint)])


def _left_for_tensors(others_bytes: int) -> int:
    """Return the bytes of a GPU that only this process uses: all but the driver's, CUDA's context and libraries'.

    `others_bytes` were used before this process began. The buffers of a run's communicators are not subtracted: how
    many channels NCCL opens depends on the links (docs/explanation/accuracy.md has what they take at most).
    """
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(0)
    return free + others_bytes


def _events(work: Callable[[], object], calls: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000 / calls


def _host_copy_s(size: int) -> float:
    """Time a copy from pinned memory."""
    source, target = torch.zeros(size, dtype=torch.uint8).pin_memory(), _bytes(size, 0)
    return _best(_events, lambda: target.copy_(source, non_blocking=True))


def _peer_copy_s(size: int) -> float:
    """Time a copy from one GPU to the next with the host's clock: events of one GPU do not see the other's work."""
    source, target = _bytes(size, 0), _bytes(size, 1)

    def copies(work: Callable[[], object], calls: int) -> float:
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        start = time.perf_counter()
        for _ in range(calls):
            work()
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        return (time.perf_counter() - start) / calls

    return _best(copies, lambda: target.copy_(source, non_blocking=True), calls=MESSAGES)


def _bytes(size: int, gpu: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=f"cuda:{gpu}")


# -- both --------------------------------------------------------------------------------------------------------------


def _device(found: DetectedDevices, place: str, timer: Timer, say: Say) -> Device:
    peaks = _peaks(place, LARGEST[found.kind], timer, say)
    say("timing kernels and memory")
    one = torch.zeros(1, device=place)
    kernel_s = _best(timer, lambda: one + 1, calls=KERNELS)
    return Device(
        found.name, found.memory_bytes, peaks, _sum_bytes_s(place, SUM_BYTES[found.kind], timer), kernel_s=kernel_s
    )


def _peaks(place: str, largest: int, timer: Timer, say: Say) -> dict[str, float]:
    """FLOP/s of large matmuls by dtype. Their tries are in turns: where others slow the machine down for a second, each
    dtype has tries outside of it."""
    matmuls = {}
    for dtype in dict.fromkeys((*DTYPES, *AUTOCAST)):
        say(f"timing matmuls in {dtype}")
        with suppress(RuntimeError):  # a dtype that this device cannot multiply has no peak
            matmuls[dtype] = _matmul(place, getattr(torch, dtype), largest, timer)
    say("timing matmuls in turns")
    works, flops = zip(*matmuls.values(), strict=True)
    seconds = _best_of_each(timer, works)
    return {dtype: flop / best for dtype, flop, best in zip(matmuls, flops, seconds, strict=True)}


def _matmul(place: str, dtype: torch.dtype, largest: int, timer: Timer) -> tuple[Callable[[], object], int]:
    """A matmul of square matrices, as large as it can be in a short time, and its FLOP."""
    rows = SMALL
    while True:
        a, b = (torch.rand(rows, rows, device=place).to(dtype) for _ in range(2))
        work = partial(torch.mm, a, b, out=torch.empty_like(a))
        work()
        if rows >= largest or 8 * timer(work, 1) > TRY_S:
            return work, 2 * rows**3
        rows *= 2


def _sum_bytes_s(place: str, size: int, timer: Timer) -> float:
    """Bytes/s that a sum of two large tensors reads and writes."""
    a, b = (torch.ones(size // 4, device=place) for _ in range(2))
    total = torch.empty_like(a)
    return 3 * size / _best(timer, lambda: torch.add(a, b, out=total))


def _best(timer: Timer, work: Callable[[], object], calls: int = 1) -> float:
    """Seconds of the fastest try within the budget, after one that does not count."""
    return _best_of_each(timer, [work], calls)[0]


def _best_of_each(timer: Timer, works: Sequence[Callable[[], object]], calls: int = 1) -> list[float]:
    """`_best` of several in turns, A B C A B C, within the budget of all of them."""
    for work in works:
        timer(work, calls)
    tries: list[list[float]] = []
    end = time.perf_counter() + BUDGET_S * len(works)
    while not tries or time.perf_counter() < end:
        tries.append([timer(work, calls) for work in works])
    return [min(seconds) for seconds in zip(*tries, strict=True)]


def _fitted(seconds: list[float]) -> Link:
    """The straight line through the times of a small and of a large message."""
    ((small, large),) = pairwise(MESSAGES_BYTES)
    beta = max(0.0, seconds[1] - seconds[0]) / (large - small)
    return Link(max(0.0, seconds[0] - small * beta), beta)
