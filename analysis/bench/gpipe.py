"""Benchmark of the gpipe engine on CPU devices, against the single device and with each component switched off."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from analysis.bench.round_robin import Times, at_once, run_interleaved, speedup
from engines.gpipe.engine import Config as GPipeConfig
from engines.gpipe.engine import build as build_gpipe
from engines.single.engine import Config as SingleConfig
from engines.single.engine import build as build_single
from harness.core.cluster import Cluster, Device, Link
from harness.core.memory_model import named
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.core.trace import Trace
from harness.interfaces import Batch, BatchShape, Engine, Model, PlanRequest, Session, SessionSpec
from harness.measure.profile_model import measure
from models.unet.config import Config as UNetConfig
from models.unet.unet import UNet
from planners.balance import Config as BalanceConfig
from planners.balance import build as build_balance

Row = dict[str, Any]
ABLATION: dict[str, dict[str, bool]] = {
    "none": {"dependency": False, "streams": False, "portals": False},
    "dependency": {"streams": False, "portals": False},
    "dependency + streams": {"portals": False},
    "dependency + streams + portals": {},
}


class Bench:
    """A U-Net, a batch, and sessions of several engines on them, open at the same time."""

    def __init__(self, size: int = 16, micro_batches: int = 8, channels: int = 16, side: int = 128) -> None:
        self.model: Model = UNet(UNetConfig(convs=2, channels=channels, size=side))
        self.micro_batches = micro_batches
        torch.manual_seed(0)
        self.batch: Batch = self.model.sample(size)
        self.profile: ModelProfile = measure(self.model, size // micro_batches, "float32", "cpu", repeats=15)
        self.stack = ExitStack()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def balanced(self, stages: int, recompute: str) -> Plan:
        """The exact planner's cut, by measured times."""
        cluster = Cluster(devices_per_node=stages, device=Device(memory_bytes=10**12), intra=Link(0.0, 1 / 5e9))
        request = PlanRequest(BatchShape(len(self.batch), self.micro_batches), stages, recompute=recompute)
        return build_balance(BalanceConfig()).plan(self.profile, cluster, named("sgd_fp32"), request)

    def open(self, engine: Engine, plan: Plan) -> Session:
        spec = SessionSpec(("cpu",) * (max(plan.devices) + 1))
        return self.stack.enter_context(engine.session(self.model, plan, spec))

    def single(self, recompute: str = "never", threads: int = 1) -> Session:
        plan = Plan.contiguous([len(self.profile.layers)], self.micro_batches, recompute)
        return self.open(build_single(SingleConfig(threads=threads)), plan)

    def gpipe(self, plan: Plan, **switches: bool) -> Session:
        config = GPipeConfig()
        for key, value in switches.items():
            setattr(config, key, value)
        return self.open(build_gpipe(config), plan)

    def step_of(self, session: Session) -> Callable[[], float]:
        return lambda: session.step(self.batch).step_time_s

    def run_interleaved(self, sessions: dict[str, Session], rounds: int) -> dict[str, Times]:
        return run_interleaved({name: self.step_of(session) for name, session in sessions.items()}, rounds)


def two_devices(rounds: int) -> list[Row]:
    """Two CPU devices, 8 micro-batches, no checkpointing, against one device with one thread and with all.

    `ideal` is 2 m / (m + 1) times the balance achieved. Two independent runs at once show what two of this machine's
    cores give together (2.0 if they shared nothing); `of ideal x cores` is what the pipeline makes of that.
    """
    with Bench(size=8, channels=32, side=64) as bench:
        plan = bench.balanced(2, "never")
        sessions = {"single": bench.single(), "single, all threads": bench.single(threads=0)}
        sessions["gpipe, 2 devices"] = bench.gpipe(plan)
        entries = {name: bench.step_of(session) for name, session in sessions.items()}
        pair = [bench.step_of(bench.single()) for _ in range(2)]
        times = run_interleaved({**entries, "2 x single at once": lambda: at_once(pair)}, rounds)
        trace = sessions["gpipe, 2 devices"].trace()
    steps = [trace.only(number) for number in range(1, len(trace.steps))]
    busy = [statistics.median(step.busy_s(device) for step in steps) for device in (0, 1)]
    balance = sum(busy) / 2 / max(busy)
    ideal = 2 * bench.micro_batches / (bench.micro_batches + 1) * balance
    cores = speedup(times, "2 x single at once", "single")
    rows = [_row(name, times, "single") for name in times]
    rows[2] |= {
        "ideal": ideal,
        "of ideal x cores": speedup(times, "gpipe, 2 devices", "single") / (ideal * cores / 2),
        "balance": balance,
        "overlap F": statistics.median(overlap(step, "F") for step in steps),
        "overlap B": statistics.median(overlap(step, "B") for step in steps),
    }
    return rows


def overlap(trace: Trace, kind: str) -> float:
    """The share of device 0's time in such ops during which device 1 is in such an op, too."""
    of: list[list[tuple[float, float]]] = [
        [(s.start_s, s.end_s) for s in trace.spans if s.device == device and s.parsed.kind == kind] for device in (0, 1)
    ]
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in of[0] for b in of[1])
    return both / sum(end - start for start, end in of[0])


def one_device(rounds: int) -> list[Row]:
    """One device, one micro-batch: the pipeline's own cost in time and memory."""
    with Bench(size=4, micro_batches=1) as bench:
        plan = Plan.contiguous([len(bench.profile.layers)])
        sessions = {"single": bench.single(), "gpipe, 1 device": bench.gpipe(plan)}
        times = bench.run_interleaved(sessions, rounds)
        peaks = {name: session.step(bench.batch, meter=True).peak_memory_bytes for name, session in sessions.items()}
    rows = [_row(name, times, "single") for name in sessions]
    for row in rows:
        row["peak memory"] = sum(peaks[row["entry"]] or [])
        row["memory / single"] = row["peak memory"] / sum(peaks["single"] or [1])
    return rows


def checkpointing(rounds: int) -> list[Row]:
    """except_last with 2 micro-batches on one device: half of the forward work twice, 3 / 3.5 of the speed."""
    with Bench(size=8, micro_batches=2) as bench:
        layers = [len(bench.profile.layers)]
        sessions = {
            "never": bench.gpipe(Plan.contiguous(layers, 2, "never")),
            "except_last": bench.gpipe(Plan.contiguous(layers, 2, "except_last")),
        }
        times = bench.run_interleaved(sessions, rounds)
    rows = [_row(name, times, "never") for name in sessions]
    forward = bench.profile.sum("forward_s", 0, layers[0] - 1)
    total = forward + bench.profile.sum("backward_s", 0, layers[0] - 1)
    rows[-1] |= {"expected, backward = 2 forward": 3 / 3.5, "expected, profile": total / (total + forward / 2)}
    return rows


def components(rounds: int, stages: Sequence[int] = (2, 4)) -> list[Row]:
    """The rows of the paper's Table 1 in small, on two and on four CPU devices."""
    rows: list[Row] = []
    for count in stages:
        with Bench() as bench:
            plan = bench.balanced(count, "except_last")
            sessions = {name: bench.gpipe(plan, **switches) for name, switches in ABLATION.items()}
            times = bench.run_interleaved(sessions, rounds)
            for name, session in sessions.items():
                metrics = session.step(bench.batch, meter=True)
                trace = session.trace().only(rounds)
                rows.append(
                    _row(name, times, "none")
                    | {
                        "devices": count,
                        "utilization": sum(trace.utilization(range(count))) / count,
                        "peak memory": sum(metrics.peak_memory_bytes or []),
                        "bytes sent": sum(metrics.bytes_sent.values()),
                    }
                )
    return rows


def _row(name: str, times: Any, base: str) -> Row:
    low, high = times[name].spread_s
    return {
        "entry": name,
        "step": times[name].median_s,
        "quartiles": [low, high],
        f"speed / {base}": speedup(times, name, base),
    }
