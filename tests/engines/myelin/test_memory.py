"""Bytes that a step of the myelin engine holds, against those that the ledger counts for the same moments."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.core.memory_model import named
from harness.core.trace import Trace
from harness.interfaces import Session
from harness.measure.count_model import count
from harness.schedule.dependency_graph import build_graph
from harness.simulator.memory_timeline import peaks
from tests.engines import networks
from tests.engines.myelin.cases import case, schedule_of
from tests.engines.networks import Network
from tests.support.sessions import run_session


def wide() -> Network:
    """Large inputs, large weights, a skip over two stages."""

    def layers() -> list[nn.Module]:
        return [
            nn.Linear(4096, 64), networks.Stash("up"), nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64), nn.Tanh(),
            networks.Recall("up"), nn.Linear(64, 64),
        ]  # fmt: skip

    return Network("wide", layers, lambda n: torch.randn(n, 4096), lambda n: torch.randn(n, 64), networks._squares)


@pytest.mark.usefixtures("no_workspaces")
def test_a_pipeline_of_four_holds_what_is_counted() -> None:
    """The ledger has a message at its receiver from when it is sent."""
    one = case(wide(), 4, m=1)

    def work(session: Session) -> tuple[list[int], Trace]:
        batch = one.model.sample(one.samples)
        measured = [session.step(batch, meter=True).peak_memory_bytes for _ in range(2)]
        assert measured[1]
        return measured[1], session.trace().only(1)

    measured, trace = run_session(one.engine, one.model, one.plan, one.spec, work)
    schedule, profile = schedule_of(one), count(one.model, one.samples, one.dtype)
    memory = one.engine.memory(named("sgd_fp32"), one.plan.mesh, profile)
    moments, ops = {span.op: span for span in trace.spans}, build_graph(schedule)
    began, ended = ([getattr(moments[str(op)], key) for op in ops.ops] for key in ("start_s", "end_s"))
    counted = peaks(ops, began, ended, schedule, one.plan, profile, memory)
    ratios = [peak.bytes / size for peak, size in zip(counted, measured, strict=True)]
    assert all(0.95 < ratio < 1.15 for ratio in ratios), ratios
