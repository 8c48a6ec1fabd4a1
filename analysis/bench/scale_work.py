"""`python -m analysis.bench.scale_work SUBJECT SIZE`: one piece of work of `make bench ARGS=scale`, in a process of its
own; prints the seconds of the work alone, and the bytes of the largest of its processes."""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from harness.core.cluster import Cluster, Device, Link
from harness.core.memory_model import MemoryModel, named
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Plan
from harness.core.products import Product
from harness.interfaces import BatchShape, PlanRequest

MICRO_BATCHES = 32
NODE = 8
DEVICES = 8
"""Of a plan by MadPipe, and shards of one by AutoDDL."""
SAMPLES = 4096
GPT = ("engine=myelin", "model=gpt_12b", "precision=fp16", "optimizer.name=adamw", "cluster=dgx_a100_80")
LINK = Link(1e-6, 1 / 12e9)


def stages(size: int, folder: str) -> Callable[[], object]:
    """A step of 1F1B with so many stages and 32 micro-batches; making the schedule counts, too."""
    from harness.schedule.builders.one_f_one_b import one_f_one_b
    from harness.schedule.transfers import plan_transfers
    from harness.simulator import simulate

    layer = LayerProfile("layer", 1e-3, 2e-3, output_bytes=10**6, saved_bytes=10**6)
    profile = ModelProfile((layer,) * size)
    plan = Plan.contiguous([1] * size, MICRO_BATCHES)
    cluster = Cluster(nodes=-(-size // NODE), devices_per_node=NODE, intra=LINK, node_port=LINK)

    def work() -> object:
        schedule = one_f_one_b(MICRO_BATCHES, range(size), plan_transfers(plan, profile, portals=True))
        return simulate(schedule, plan, profile, cluster, MemoryModel())

    return work


def chain(layers: int) -> ModelProfile:
    """Layers of many lengths, as those of a network of convolutions."""
    drawn = random.Random(layers)
    return ModelProfile(
        tuple(
            LayerProfile(
                f"layer{number}",
                seconds := drawn.uniform(0.5e-3, 2e-3),
                2 * seconds,
                param_bytes=drawn.randrange(10**6, 10**7),
                output_bytes=(size := drawn.randrange(10**6, 2 * 10**7)),
                saved_bytes=size,
            )
            for number in range(layers)
        ),
        "chain",
        1,
        input_bytes=10**7,
    )


def madpipe(size: int, folder: str) -> Callable[[], object]:
    """A plan of the planner `madpipe`, as by default, for a chain of so many layers; half the memory of the whole
    model's activations and weights with two micro-batches."""
    from planners.madpipe.planner import Config, build

    profile, memory = chain(size), named("madpipe_paper")
    bytes_ = sum(layer.param_bytes * 3 + 2 * layer.saved_bytes for layer in profile.layers)
    device = Device(memory_bytes=bytes_ // 2)
    cluster = Cluster(devices_per_node=DEVICES, device=device, intra=LINK)
    request = PlanRequest(BatchShape(MICRO_BATCHES, MICRO_BATCHES), pipeline=DEVICES)
    return lambda: build(Config()).plan(profile, cluster, memory, request)


def autoddl(size: int, folder: str) -> Callable[[], object]:
    """The cheapest strategies of so many matrix products of unequal sizes, on 8 devices."""
    from planners.autoddl.planner import Config, build

    drawn = random.Random(size)
    widths = [256 * drawn.randint(1, 32) for _ in range(size + 1)]
    layers = tuple(
        LayerProfile(
            f"layer{number}",
            param_bytes=4 * inputs * outputs,
            output_bytes=4 * SAMPLES * outputs,
            saved_bytes=4 * SAMPLES * outputs,
            products=(Product("linear", "linear", 1, inputs, outputs, 4 * inputs * outputs),),
        )
        for number, (inputs, outputs) in enumerate(pairwise(widths))
    )
    profile = ModelProfile(layers, "products", SAMPLES, input_bytes=4 * SAMPLES * widths[0])
    cluster = Cluster(devices_per_node=DEVICES, device=Device(memory_bytes=10**15), intra=LINK)
    request = PlanRequest(BatchShape(SAMPLES, 1), pipeline=1, tensor=DEVICES)
    return lambda: build(Config()).plan(profile, cluster, MemoryModel(), request)


def sweep(size: int, folder: str) -> Callable[[], object]:
    """What a sweep of so many points does before the first one runs: each is composed and checked."""
    from harness.sweep import run_point
    from harness.sweep.points import expand, refuse_mistyped

    seeds = ",".join(map(str, range(size)))

    def work() -> object:
        points = expand(["engine=gpipe", "model=mlp", f"seed={seeds}"])
        refuse_mistyped(points)
        return [*map(run_point.composed, points)]

    return work


def records(size: int, folder: str) -> Callable[[], object]:
    """The accuracy ledger and the frame of so many records in as many folders: copies of one that is measured."""
    from analysis import accuracy, dataframe
    from analysis import records as archive
    from harness.config.registry import ROOT
    from harness.core.run_files import RECORD

    packs = sorted((ROOT / "analysis" / "results" / "records").glob("*.jsonl.gz"))
    one = next(r for r in archive.load(packs).records if r.source == "measured" and r.status == "ok")
    place = Path(folder)
    for number in range(size):
        (place / str(number)).mkdir()
        own = replace(one, id=str(number), manifest=one.manifest | {"overrides": [f"seed={number}"]})
        own.save(place / str(number) / RECORD)

    def work() -> object:
        loaded = archive.load([place]).records
        return accuracy.ledger(loaded), dataframe.runs(loaded)

    return work


def simulation(size: int, folder: str) -> Callable[[], object]:
    """`mode=simulate` of pipelines of 8 stages on so many devices, from its start to its end."""
    nodes = size // NODE
    mesh = [f"mesh.pipeline={NODE}", f"mesh.data={nodes}", f"batch.size={32 * nodes}", "batch.micro_batches=32"]
    return _command("mode=simulate", *GPT, f"cluster.nodes={nodes}", *mesh, f"out={folder}/run")


def tuning(size: int, folder: str) -> Callable[[], object]:
    """`mode=tune` of one engine on so many devices, from its start to its end."""
    return _command("mode=tune", *GPT, f"cluster.nodes={size // NODE}", "batch.size=20000", f"out={folder}/run")


def _command(*keys: str) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, "run.py", *keys], check=True, stdout=subprocess.DEVNULL)


SUBJECTS = {one.__name__: one for one in (stages, simulation, tuning, madpipe, autoddl, sweep, records)}


def main(arguments: list[str]) -> int:
    """Prints what the work has taken; returns 0."""
    parser = argparse.ArgumentParser("python -m analysis.bench.scale_work", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("size", type=int)
    wanted = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        work = SUBJECTS[wanted.subject](wanted.size, folder)
        start = time.perf_counter()
        work()
        seconds = time.perf_counter() - start
    largest = max(own_kibibytes(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
    print(json.dumps({"seconds": seconds, "bytes": 1024 * largest}))
    return 0


def own_kibibytes() -> int:
    """The most memory that this program has had, from the kernel; getrusage counts that of the process that started it,
    too."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
