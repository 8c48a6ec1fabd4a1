"""The benchmark of all engines: one model, one batch, two devices, interleaved rounds.

Every entry has its own process, engines of ranks with a rank for each device; it computes only in its turn.

    bench --"step"--> single             |== step ==|
          --"step"--> gpipe                         |== step ==|
          --"step"--> deepspeed rank 0                         |== step ==|
                                rank 1                         |== step ==|

An entry that fails is left out from then on, and its row says so; the others continue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

from analysis.bench.results import BASE, DEVICES
from analysis.bench.round_robin import Times, run_interleaved, speedup
from analysis.bench.worker import Entry, EntryProcess
from harness.checks import mesh, request
from harness.cli.compose import compose
from harness.config import cluster_config, registry
from harness.core.model_profile import ModelProfile
from harness.core.problem import CannotRun, refuse
from harness.host import devices, machine
from harness.host.machine import Machine
from harness.interfaces import Batch, Engine, Model, OptimizerSpec, SessionSpec
from harness.launch import forked_ranks
from harness.measure import benchmark_machine
from harness.measure.profile_model import measure
from harness.planning import draft as planning_draft

T = TypeVar("T")
Row = dict[str, Any]
MODELS = {
    "U-Net": ("model=unet", "batch.size=16", "batch.micro_batches=8"),
    "GPT": ("model=gpt", "model.hidden=256", "model.sequence=128", "batch.size=16", "batch.micro_batches=8"),
    "AmoebaNet-D": ("model=amoebanet", "model.channels=64", "model.size=128", "batch.size=16", "batch.micro_batches=8"),
}
"""Small, but with kernels of a millisecond: below that the interpreter is what is measured."""
ON_GPUS = {
    "U-Net": ("model=unet_5_64", "batch.size=32", "batch.micro_batches=8"),
    "GPT": ("model=gpt_110m", "batch.size=32", "batch.micro_batches=8"),
    "AmoebaNet-D": ("model=amoebanet_18_208", "batch.size=32", "batch.micro_batches=8"),
}
"""Variant of the benchmark for a machine with GPUs."""
ENTRIES = {
    BASE: ("engine=single",),
    "single, all threads": ("engine=single", "engine.threads=0"),
    "gpipe": ("engine=gpipe", "engine.checkpoint=never"),
    "torchgpipe": ("engine=torchgpipe", "engine.checkpoint=never"),
    "torch_pipelining, GPipe": ("engine=torch_pipelining", "engine.schedule=gpipe"),
    "torch_pipelining, 1F1B": ("engine=torch_pipelining", "engine.schedule=1f1b"),
    "torch_pipelining, interleaved": ("engine=torch_pipelining", "engine.schedule=interleaved1f1b"),
    "torch_pipelining, ZB-V": ("engine=torch_pipelining", "engine.schedule=zbv"),
    "deepspeed, pipeline": ("engine=deepspeed",),
    "myelin": ("engine=myelin",),
    "sbp": ("engine=sbp", "planner=autoddl", "mesh.tensor=2"),
    "ddp": ("engine=ddp",),
    "fsdp": ("engine=fsdp",),
    "deepspeed, ZeRO 1": ("engine=deepspeed", "engine.zero=1", "mesh.pipeline=1"),
    "deepspeed, ZeRO 2": ("engine=deepspeed", "engine.zero=2"),
    "deepspeed, ZeRO 3": ("engine=deepspeed", "engine.zero=3"),
}
"""Entries by their names in the table. Those of engines that do not exist are left out."""


def all_engines(rounds: int) -> list[Row]:
    """U-Net, GPT and AmoebaNet-D on two devices over all engines that take them, interleaved; `single` is one device.

    A device has as many samples of a micro-batch everywhere: engines that share it, or the batch, have fewer of them.
    No checkpointing.
    """
    torch.set_num_threads(1)  # so that the processes that are forked inherit no pool of threads
    detected = devices.detect()
    here = machine.stored() or apart(benchmark_machine.measure, devices.torch_names(detected.kind, 1)[0])
    models = MODELS if detected.kind == "cpu" else ON_GPUS
    return [row for name, keys in models.items() for row in benchmark_model(name, keys, here, rounds)]


def benchmark_model(name: str, keys: Sequence[str], here: Machine, rounds: int) -> list[Row]:
    """Benchmark one model: `name` is its name in the rows, `keys` choose model and batch, whose samples rows say."""
    entries, refused = entered(keys, here)
    config = compose([*keys, f"engine={BASE}"])
    torch.manual_seed(0)
    model: Model = registry.build("model", config.model)
    rows: list[Row] = run_entries(name, entries, model.sample(config.batch.size), rounds)
    rows += [{"model": name, "entry": title, "note": why} for title, why in refused.items()]
    samples = {"batch": config.batch.size, "micro-batch": config.batch.size // config.batch.micro_batches}
    return [row | samples for row in rows]


def entered(keys: Sequence[str], here: Machine) -> tuple[dict[str, Entry], dict[str, str]]:
    """The entries whose engines exist: those that can run, and why the others cannot."""
    engines = {plugin.name for plugin in registry.scan() if plugin.group == "engine"}
    entries: dict[str, Entry] = {}
    refused: dict[str, str] = {}
    profile = profiled(keys)
    for title, choices in ENTRIES.items():
        if choices[0].partition("=")[2] not in engines:
            continue
        try:
            entries[title] = entry([*keys, *choices], profile, here)
        except CannotRun as error:
            refused[title] = "; ".join(problem.statement for problem in error.problems)
    return entries, refused


def run_entries(model: str, entries: Mapping[str, Entry], batch: Batch, rounds: int) -> list[Row]:
    """One row for each entry; the row of an entry that failed says when and why."""
    with ExitStack() as stack:
        all_ = {title: stack.enter_context(EntryProcess(entry, batch)) for title, entry in entries.items()}
        times = run_interleaved({title: one.step for title, one in all_.items()}, rounds)
        peaks = {title: one.peak_bytes() for title, one in all_.items()}
    finished = {title: taken for title, taken in times.items() if not math.isnan(sum(taken.rounds_s))}
    return [_row(model, title, finished, peaks[title], one.failed) for title, one in all_.items()]


def _row(model: str, title: str, times: Mapping[str, Times], peaks: list[int] | None, failed: str) -> Row:
    row: Row = {"model": model, "entry": title}
    if title in times:
        row |= {"step": times[title].median_s, "quartiles": list(times[title].spread_s)}
    if title in times and BASE in times:
        row[f"speed / {BASE}"] = speedup(times, title, BASE)
    if peaks:
        row["peak memory"] = max(peaks)
    return row | ({"failed": failed} if failed else {})


def profiled(keys: Sequence[str]) -> ModelProfile:
    """The times of the layers with micro-batches as the keys have them, of one thread."""
    config = compose([*keys, "engine=single"])
    device = devices.torch_names(devices.detect().kind, 1)[0]
    model: Model = registry.build("model", config.model)
    samples = config.batch.size // config.batch.micro_batches
    return apart(lambda: measure(model, samples, "float32", device, repeats=9), device)


def apart(work: Callable[[], T], device: str) -> T:
    """Run `work` in its own process, so that later forks of this one find neither threads nor CUDA in use."""
    return forked_ranks.run_on_ranks(1, work, [device])


def entry(overrides: Sequence[str], profile: ModelProfile, here: Machine, count: int = DEVICES) -> Entry:
    """Plan for `count` devices as run.py does. Raises CannotRun for what the engine refuses."""
    detected = devices.detect()
    config = compose(
        [*overrides, "optimizer.lr=0.01", *([f"cluster.devices={count}"] if detected.kind == "cpu" else [])]
    )
    engine: Engine = registry.build("engine", config.engine)
    names = devices.torch_names(detected.kind, count)
    cluster = cluster_config.build(cluster_config.from_group(config.cluster), here)
    mesh.fill(config, engine.capabilities, count)
    tensor = config.mesh.tensor or 1  # a device's share of a micro-batch is as large as the others' micro-batches
    config.batch.micro_batches //= (config.mesh.data or 1) * min(tensor, config.batch.micro_batches)
    profile = profile.for_samples(mesh.micro_batch(config))
    refuse(request.request(config, engine.capabilities, cluster))
    draft = planning_draft.draft(config, engine, registry.build("planner", config.planner), profile, cluster)
    spec = SessionSpec(names, OptimizerSpec(**config.optimizer), seed=config.seed)
    return Entry(engine, registry.build("model", config.model), draft.plan, spec, profile)
