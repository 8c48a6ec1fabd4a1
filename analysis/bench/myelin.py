"""Benchmark of the message-driven pipeline on CPU ranks, and the accuracy of its prediction."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from analysis.bench.entries import Row, apart, prepared, profiled
from analysis.bench.results import BASE, DEVICES
from analysis.bench.round_robin import Times, at_once, run_interleaved, speedup
from analysis.bench.worker import EntryProcess
from harness.cli.compose import compose
from harness.config import registry
from harness.host import devices
from harness.host.machine import Machine
from harness.interfaces import Model
from harness.measure import benchmark_machine

MODELS = {
    "U-Net (2, 32)": ("model=unet", "model.convs=2", "model.channels=32", "model.size=64", "batch.size=8"),
    "U-Net (2, 48)": ("model=unet", "model.convs=2", "model.channels=48", "model.size=64", "batch.size=8"),
    "GPT, width 256": ("model=gpt", "model.hidden=256", "model.sequence=128", "batch.size=16"),
    "GPT, width 512": ("model=gpt", "model.hidden=512", "model.sequence=128", "batch.size=16"),
}
"""Twice: computing grows with the square of the width, what is sent with the width."""
ONE = "myelin, one rank"
ENTRIES = {
    BASE: ("engine=single",),
    "gpipe": ("engine=gpipe", "engine.checkpoint=never"),
    "deepspeed, pipeline": ("engine=deepspeed",),
    "myelin": ("engine=myelin",),
    ONE: ("engine=myelin",),
    "myelin, limit 3": ("engine=myelin", "engine.pipeline_limit=3"),
    "myelin, 1F1B's order": ("engine=myelin", "engine.order=1f1b"),
    "myelin, over gloo": ("engine=myelin", "engine.transport=torch"),
}
BOTH = "2 x single at once"
MICRO_BATCHES = (2, 4, 8)


def messages(rounds: int) -> list[Row]:
    """Two ranks of Myelin against one, and against others on the same plan; then predicted against measured.

    Two runs at once show what two of this machine's cores give together.
    """
    torch.set_num_threads(1)  # so that the processes that are forked inherit no pool of threads
    here = apart(benchmark_machine.whole, devices.torch_names("cpu", 1)[0])
    rows = [
        row for name, keys in MODELS.items() for row in speeds(name, (*keys, "batch.micro_batches=8"), here, rounds)
    ]
    two = [
        predicted(name, (*keys, f"batch.micro_batches={m}"), here, rounds, 2)
        for name, keys in MODELS.items()
        for m in MICRO_BATCHES
    ]
    four = [predicted(name, (*keys, "batch.micro_batches=8"), here, rounds, 4) for name, keys in MODELS.items()]
    error = statistics.median(abs(row["predicted / measured"] - 1) for row in two)
    return [*rows, *two, *four, {"entry": "median absolute error, 2 ranks", "error of time": error}]


def speeds(name: str, keys: Sequence[str], here: Machine, rounds: int) -> list[Row]:
    """All entries in interleaved rounds, each in its own process."""
    profile = profiled(keys)
    entries = {
        title: prepared([*keys, *own], profile, here, 1 if title == ONE else DEVICES) for title, own in ENTRIES.items()
    }
    model: Model = registry.build("model", compose([*keys, f"engine={BASE}"]).model)
    batch = model.sample(profile.micro_batch * entries[BASE].plan.micro_batches)
    with ExitStack() as stack:
        all_ = {title: stack.enter_context(EntryProcess(entry, batch)) for title, entry in entries.items()}
        pair = [stack.enter_context(EntryProcess(entries[BASE], batch)) for _ in range(2)]
        times = run_interleaved(
            {title: one.step for title, one in all_.items()} | {BOTH: lambda: at_once([one.step for one in pair])},
            rounds,
        )
    return [
        _row(name, title, taken) | {f"speed / {other}": speedup(times, title, other) for other in (BASE, ONE, "gpipe")}
        for title, taken in times.items()
    ]


def predicted(name: str, keys: Sequence[str], here: Machine, rounds: int, count: int) -> Row:
    """The simulated and the measured step of `count` ranks."""
    profile = profiled(keys)
    entry = prepared([*keys, *ENTRIES["myelin"]], profile, here, count)
    batch = entry.model.sample(profile.micro_batch * entry.plan.micro_batches)
    with EntryProcess(entry, batch) as one:
        taken = run_interleaved({"myelin": one.step}, rounds)["myelin"]
    step_s = entry.plan.predicted["step_time_s"]
    title = f"myelin, {count} ranks, {entry.plan.micro_batches} micro-batches"
    return _row(name, title, taken) | {"predicted": step_s, "predicted / measured": step_s / taken.median_s}


def _row(model: str, title: str, times: Times) -> Row:
    return {"model": model, "entry": title, "step": times.median_s, "quartiles": [*times.spread_s]}
