"""The period that is measured next to that of the pattern: python -m tests.engines.periodic.period

Two CPU devices; the plan is the best contiguous one for a profile that was measured just before. The machine must have
two cores free, or both numbers mean little.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict

import torch
from omegaconf import OmegaConf

from engines.periodic.engine import Config, PeriodicEngine, build
from harness.config import registry
from harness.core import memory_model
from harness.core.cluster import Cluster, Device, Link
from harness.core.model_profile import ModelProfile
from harness.core.op import Op
from harness.core.plan import Mesh, Plan
from harness.core.trace import Trace
from harness.host import malloc
from harness.interfaces import Model, SessionSpec
from harness.measure import profile_model
from harness.run.metrics import period_s
from planners.periodic import contiguous_partition, one_f_one_b_star
from planners.periodic.layer_ticks import chain_from_profile

MODELS = {
    "unet": {"convs": 2, "channels": 16, "size": 64},
    "resnet": {"blocks": [2, 2, 2], "channels": 16, "size": 64},
    "gpt": {"layers": 6, "hidden": 128, "heads": 4, "sequence": 128, "vocabulary": 512, "tied": False},
}
MICRO_BATCH, MICRO_BATCHES, EVERY = 4, 32, (None, 8)


def planned(profile: ModelProfile, devices: int, micro_batches: int) -> Plan:
    """1F1B* of the best contiguous partition, memory and links without limits."""
    cluster = Cluster(devices_per_node=devices, device=Device(memory_bytes=2**40), intra=Link(beta_s_per_byte=1e-10))
    chain = chain_from_profile(profile, cluster, memory_model.named("madpipe_paper"))
    found = contiguous_partition.best(chain, devices)
    assert found is not None
    period, stages = found
    pattern = one_f_one_b_star.timing(chain, stages, period).pattern()
    return Plan(Mesh(pipeline=devices), stages, micro_batches, pattern=pattern)


def busiest_s(trace: Trace, plan: Plan, updates: int) -> float:
    """What the busiest device did in a period, by the medians of its tasks: no order of them can be faster."""
    took: dict[tuple[int, str], list[float]] = defaultdict(list)
    for span in trace.spans:
        op = Op.parse(span.op)
        took[op.stage, op.kind].append(span.end_s - span.start_s)
    shares = {"F": 1.0, "B": 1.0, "step": updates / plan.micro_batches}
    loads: dict[int, float] = defaultdict(float)
    for (stage, kind), seconds in took.items():
        loads[plan.stages[stage].device] += statistics.median(seconds) * shares.get(kind, 0.0)
    return max(loads.values())


def ran(engine: PeriodicEngine, model: Model, plan: Plan) -> Trace:
    """The third step."""
    with engine.session(model, plan, SessionSpec(("cpu",) * len(plan.devices))) as session:
        for _ in range(3):
            session.step(model.sample(MICRO_BATCH * MICRO_BATCHES))
        return session.trace().only(2)


def main() -> None:
    description = (__doc__ or "").partition(":")[0]
    argparse.ArgumentParser("python -m tests.engines.periodic.period", description=description).parse_args()
    malloc.tune()
    torch.set_num_threads(1)
    print("model     every   planned   busiest device as it ran   measured   (ms)")
    for name, keys in MODELS.items():
        model: Model = registry.build("model", OmegaConf.create({"name": name, **keys}))
        for every in EVERY:
            plan = planned(profile_model.measure(model, MICRO_BATCH, "float32", "cpu"), 2, MICRO_BATCHES)
            engine = build(Config(update_every=every))
            trace = ran(engine, model, plan)
            assert plan.pattern is not None
            measured_s = period_s(trace)
            assert measured_s is not None
            want, least, got = (
                1e3 * seconds
                for seconds in (
                    plan.pattern.period_s,
                    busiest_s(trace, plan, MICRO_BATCHES // engine.update_every(plan)),
                    measured_s,
                )
            )
            figures = f"{want:7.2f}   {least:7.2f} ({least / want - 1:+.1%})   {got:7.2f} ({got / want - 1:+.1%})"
            print(f"{name:8}  {engine.update_every(plan):5}   {figures}", flush=True)


if __name__ == "__main__":
    main()
