"""Benchmark of the sbp engine: its overhead on the host, and the speedup of wide MLPs on two devices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from analysis.bench.entries import Row, apart, prepared, profiled
from analysis.bench.results import BASE
from analysis.bench.round_robin import Times, at_once, run_interleaved, speedup
from analysis.bench.worker import EntryProcess
from engines.sbp.engine import Config, build
from harness.cli.compose import compose
from harness.config import registry
from harness.core.cluster import Cluster, Device
from harness.core.memory_model import MemoryModel
from harness.core.plan import Plan
from harness.host import devices
from harness.interfaces import BatchShape, Model, PlanRequest, SessionSpec
from harness.launch import forked_ranks
from harness.measure import benchmark_machine
from harness.measure.count_model import count
from models.mlp.config import Config as MLPConfig
from models.mlp.mlp import build as build_mlp
from planners.strategies import Config as StrategiesConfig
from planners.strategies import build as build_strategies

WIDTH, SAMPLES = 64, 16
CALLS = 300
"""Forward and backward passes of a round."""
WIDTHS = (2048, 4096)
"""Widths of the MLPs. Communication grows with the width, computation with its square."""
WIDE = ("model=mlp", "batch.size=512", "batch.micro_batches=1")
SPLIT = ("engine=sbp", "planner=autoddl", "mesh.tensor=2")
PLAIN, BOTH = "nn.Linear", "2 x single at once"


def sbp(rounds: int) -> list[Row]:
    """A planned Linear against a plain one, without collectives; wide MLPs on two CPU devices against one.

    Two runs at once show what two of this machine's cores give together.
    """
    torch.set_num_threads(1)  # so that the processes that are forked inherit no pool of threads
    return [*linear(1, rounds), *linear(2, rounds), *(row for width in WIDTHS for row in wide(width, rounds))]


def linear(count_: int, rounds: int) -> list[Row]:
    """One forward and backward pass, samples split over so many ranks: nothing is sent before the step's end."""
    model = build_mlp(MLPConfig(widths=[WIDTH, WIDTH]))
    plan = _split_by_samples(model, count_)
    spec = SessionSpec(("cpu",) * count_)
    session: Any = build(Config()).session(model, plan, spec)

    def work() -> dict[str, Times]:
        plain = model.layers()[0]
        x = torch.randn(SAMPLES, WIDTH, requires_grad=True)
        back = torch.randn(SAMPLES, WIDTH)
        with session as entered:
            planned = entered.stage[0]
            return run_interleaved(
                {PLAIN: lambda: passes(plain, x, back), "planned": lambda: passes(planned, x, back)}, rounds
            )

    times = forked_ranks.run_on_ranks(count_, work, spec.devices)
    title = f"planned Linear, {WIDTH} wide, {count_} rank{'s' * (count_ > 1)}"
    return [_row(title, times["planned"]) | {f"time / {PLAIN}": 1 / speedup(times, "planned", PLAIN)}]


def passes(module: Callable[[Tensor], Tensor], x: Tensor, back: Tensor) -> float:
    """Seconds of one, the mean of many."""
    start = time.perf_counter()
    for _ in range(CALLS):
        module(x).backward(back)
    return (time.perf_counter() - start) / CALLS


def _split_by_samples(model: Model, count_: int) -> Plan:
    planner = build_strategies(StrategiesConfig(strategies=[f"*:{count_}x1x1"]))
    cluster = Cluster(devices_per_node=count_, device=Device(memory_bytes=10**12))
    request = PlanRequest(BatchShape(SAMPLES * count_, 1), pipeline=1, tensor=count_)
    return planner.plan(count(model, SAMPLES * count_, "float32"), cluster, MemoryModel(), request)


def wide(width: int, rounds: int) -> list[Row]:
    """The entries in interleaved rounds, each in its own process."""
    keys = (*WIDE, f"model.widths={[width] * 4}")
    here = apart(benchmark_machine.whole, devices.torch_names("cpu", 1)[0])
    profile = profiled(keys)
    entries = {
        BASE: prepared([*keys, f"engine={BASE}"], profile, here),
        "sbp": prepared([*keys, *SPLIT], profile, here),
    }
    model: Model = registry.build("model", compose([*keys, f"engine={BASE}"]).model)
    batch = model.sample(profile.micro_batch)
    with ExitStack() as stack:
        one, two, split = (stack.enter_context(EntryProcess(entries[name], batch)) for name in (BASE, BASE, "sbp"))
        steps = {BASE: one.step, "sbp": split.step, BOTH: lambda: at_once([one.step, two.step])}
        times = run_interleaved(steps, rounds)
    strategies = sorted({"x".join(map(str, numbers)) for numbers in entries["sbp"].plan.strategy.values()})
    rows = [
        _row(f"MLP, {width} wide, {name}", taken) | {f"speed / {BASE}": speedup(times, name, BASE)}
        for name, taken in times.items()
    ]
    rows[1]["strategies"] = " ".join(strategies)
    rows[1]["of both cores"] = statistics.median(
        theirs / mine for theirs, mine in zip(times[BOTH].rounds_s, times["sbp"].rounds_s, strict=True)
    )
    return rows


def _row(title: str, times: Times) -> Row:
    return {"entry": title, "step": times.median_s, "quartiles": [*times.spread_s]}
