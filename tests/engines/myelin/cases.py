"""Plans of the myelin engine for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engines.myelin.engine import Config, MyelinEngine, build
from harness.core.plan import Mesh, Plan
from harness.core.trace import Trace
from harness.interfaces import Model, Session
from harness.measure.count_model import count
from harness.schedule import Schedule
from planners.block_partition import even
from tests.engines import networks, zoo
from tests.engines.contract import Case, gentle
from tests.support.sessions import run_session


def case(model: str | Model, pipeline: int = 2, data: int = 1, m: int = 4, **keys: Any) -> Case:
    """A model of `networks` or of the zoo, in stages of equally many layers; `keys` are the engine's."""
    network = networks.ALL.get(model) or zoo.model(model) if isinstance(model, str) else model
    keys = {"transport": "torch"} | keys
    plan = replace(Plan.contiguous(even(len(network.layers()), pipeline), m), mesh=Mesh(data=data, pipeline=pipeline))
    found = Case(build(Config(**keys)), network, plan)
    return found if model in networks.ALL or not isinstance(model, str) else gentle(found)


def schedule_of(one: Case) -> Schedule:
    assert isinstance(one.engine, MyelinEngine)
    samples = one.samples // (one.plan.micro_batches * one.plan.mesh.data)
    return one.engine.schedule(one.plan, count(one.model, samples, one.dtype))


def trace_of(one: Case) -> Trace:
    """Of the second of two steps."""

    def work(session: Session) -> Trace:
        for _ in range(2):
            session.step(one.model.sample(one.samples))
        return session.trace()

    return run_session(one.engine, one.model, one.plan, one.spec, work).only(1)
