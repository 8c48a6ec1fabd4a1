"""The race of all engines: one model, one batch, two devices, in turns.

Every contestant lives in a process of its own, engines of ranks with a rank for each device; it computes only when it
is its turn.

    bench --"step"--> single             |== step ==|
          --"step"--> gpipe                         |== step ==|
          --"step"--> deepspeed rank 0                         |== step ==|
                                rank 1                         |== step ==|
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from analysis.bench.race import Times, race, speedup
from harness import check, clusters, devices, launch, machine, malloc, planning, ranks, registry
from harness.clusters import ClusterConfig
from harness.compose import compose
from harness.interfaces import Batch, Engine, Model, OptimizerSpec, Session, SessionSpec
from harness.plan import Plan
from harness.problem import CannotRun
from harness.profile import ModelProfile
from harness.profiling import measure

T = TypeVar("T")
Row = dict[str, Any]
DEVICES = 2
BASE = "single"
PATIENCE_S = 60.0
"""How long a contestant may take for a step, or to begin."""
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
"""The same race on a machine with GPUs."""
CONTESTANTS = {
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
    "sbp": ("engine=sbp",),
    "ddp": ("engine=ddp",),
    "fsdp": ("engine=fsdp",),
    "deepspeed, ZeRO 1": ("engine=deepspeed", "engine.zero=1", "mesh.pipeline=1"),
    "deepspeed, ZeRO 2": ("engine=deepspeed", "engine.zero=2"),
    "deepspeed, ZeRO 3": ("engine=deepspeed", "engine.zero=3"),
}
"""By what the table calls them. Those whose engine is not there are left out."""


@dataclass(frozen=True)
class Entry:
    """What a contestant runs."""

    engine: Engine
    model: Model
    plan: Plan
    spec: SessionSpec
    profile: ModelProfile


def all_engines(rounds: int) -> list[Row]:
    """U-Net, GPT and AmoebaNet-D on two devices over all engines that take them, in turns; `single` is one device.

    Micro-batches have the same size everywhere: engines with replicas have as many fewer. No checkpointing.
    """
    torch.set_num_threads(1)  # so that the processes that are forked inherit no pool of threads
    models = MODELS if devices.detect().kind == "cpu" else ON_GPUS
    return [row for name, keys in models.items() for row in _of_model(name, keys, rounds)]


def _of_model(name: str, keys: Sequence[str], rounds: int) -> list[Row]:
    there = {plugin.name for plugin in registry.scan() if plugin.group == "engine"}
    chosen = {title: own for title, own in CONTESTANTS.items() if own[0].partition("=")[2] in there}
    entries: dict[str, Entry] = {}
    refused: dict[str, str] = {}
    profile = _profile(keys)
    for title, own in chosen.items():
        try:
            entries[title] = _entry([*keys, *own], profile)
        except CannotRun as error:
            refused[title] = "; ".join(f"{problem.key} {problem.what}" for problem in error.problems)
    with _opened(entries, keys) as running:
        times = race({title: one.step for title, one in running.items()}, rounds)
        peaks = {title: one.peak_bytes() for title, one in running.items()}
    rows = [_row(name, title, times, peaks[title]) for title in running]
    failed = {title: "failed to begin" for title in entries if title not in running}
    return rows + [{"model": name, "contestant": title, "note": why} for title, why in (refused | failed).items()]


def _row(model: str, title: str, times: Mapping[str, Times], peaks: list[int] | None) -> Row:
    low, high = times[title].spread_s
    return {
        "model": model, "contestant": title, "step": times[title].median_s, "quartiles": [low, high],
        f"speed / {BASE}": speedup(times, title, BASE), "peak memory": max(peaks) if peaks else None,
    }  # fmt: skip


def _profile(keys: Sequence[str]) -> ModelProfile:
    config = compose([*keys, "engine=single"])
    device = devices.torch_names(devices.detect().kind, 1)[0]
    model: Model = registry.build("model", config.model)
    samples = config.batch.size // config.batch.micro_batches
    return _apart(lambda: measure(model, samples, "float32", device, repeats=9), device)


def _apart(work: Callable[[], T], device: str) -> T:
    """In a process of its own: what is forked from this one later finds neither threads nor CUDA in use."""
    return ranks.each(1, work, [device])


def _entry(overrides: Sequence[str], profile: ModelProfile) -> Entry:
    """Planned as the front door plans. Raises CannotRun for what the engine refuses."""
    found = devices.detect()
    config = compose(
        [*overrides, "optimizer.lr=0.01", *([f"cluster.devices={DEVICES}"] if found.kind == "cpu" else [])]
    )
    engine: Engine = registry.build("engine", config.engine)
    names = devices.torch_names(found.kind, DEVICES)
    cluster = clusters.build(ClusterConfig(**config.cluster), machine.stored() or _apart(machine.measure, names[0]))
    check.fill(config, engine.capabilities, DEVICES)
    config.batch.micro_batches //= config.mesh.data or 1
    if problems := check.request(config, engine.capabilities, cluster):
        raise CannotRun(problems)
    draft = planning.draft(config, engine, registry.build("planner", config.planner), profile, cluster)
    spec = SessionSpec(names, OptimizerSpec(**config.optimizer), seed=config.seed)
    return Entry(engine, registry.build("model", config.model), draft.plan, spec, profile)


@contextmanager
def _opened(entries: Mapping[str, Entry], keys: Sequence[str]) -> Iterator[dict[str, Contestant]]:
    """Those that could begin."""
    config = compose([*keys, "engine=single"])
    with ExitStack() as stack:
        running = {}
        for title, entry in entries.items():
            torch.manual_seed(0)
            one = stack.enter_context(Contestant(title, entry, entry.model.sample(config.batch.size)))
            if one.ready():
                running[title] = one
        yield running


class Contestant:
    """A session in a process of its own, which does a step when it is told to."""

    def __init__(self, title: str, entry: Entry, batch: Batch) -> None:
        self.title = title
        fork = get_context("fork")
        self.pipe, there = fork.Pipe()
        self.process = fork.Process(target=_serve, args=(entry, batch, there))

    def __enter__(self) -> Contestant:
        self.process.start()
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # it may be gone
            self.pipe.send("")
        self.process.join(5.0)
        self.process.kill()  # its ranks go with it
        self.process.join()

    def ready(self) -> bool:
        """Whether it has begun."""
        try:
            return self.pipe.poll(PATIENCE_S) and self.pipe.recv() == "ready"
        except EOFError:
            return False

    def step(self) -> float:
        """Seconds of a step."""
        seconds: float = self._ask("step")[0]
        return seconds

    def peak_bytes(self) -> list[int] | None:
        """The most that each device held in a step; None where the engine cannot tell."""
        peaks: list[int] | None = self._ask("meter")[1]
        return peaks

    def _ask(self, command: str) -> Any:
        self.pipe.send(command)
        if not self.pipe.poll(PATIENCE_S):
            raise TimeoutError(f"{self.title}: no answer for {PATIENCE_S:g} s")
        answer = self.pipe.recv()
        if answer == "failed":
            raise RuntimeError(f"{self.title} failed: its traceback is above")
        return answer


def _serve(entry: Entry, batch: Batch, pipe: Connection) -> None:
    def loop(session: Session) -> None:
        reports = ranks.first()
        if reports:
            pipe.send("ready")
        while command := _told(pipe, reports):
            metrics = session.step(batch, meter=command == "meter")
            if reports:
                pipe.send((metrics.step_time_s, metrics.peak_memory_bytes))

    malloc.tune(entry.profile.largest_bytes)
    try:
        launch.call(entry.engine, entry.model, entry.plan, entry.spec, loop)
    except Exception:
        traceback.print_exc()
        pipe.send("failed")


def _told(pipe: Connection, reports: bool) -> str:
    """The next command, in all ranks."""
    command = [pipe.recv() if reports else ""]
    if dist.is_initialized():
        dist.broadcast_object_list(command)
    return str(command[0])
