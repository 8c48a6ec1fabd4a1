"""Plans of the myelin engine for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engines.myelin.config import Config, build
from engines.myelin.engine import MyelinEngine
from harness.counting import count
from harness.interfaces import Model, Session
from harness.launch import call
from harness.mesh import Mesh
from harness.plan import Plan
from harness.schedule import Schedule
from harness.trace import Trace
from planners.blocks import even
from tests.engines import networks, zoo
from tests.engines.contract import Case, gentle


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

    return call(one.engine, one.model, one.plan, one.spec, work).only(1)
