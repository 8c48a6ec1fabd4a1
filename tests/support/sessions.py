"""A session of an engine, entered as a worker enters it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from harness.core.plan import Plan
from harness.interfaces import Engine, Model, Session, SessionSpec
from harness.launch.forked_ranks import run_session_on_ranks

T = TypeVar("T")


def run_session(engine: Engine, model: Model, plan: Plan, spec: SessionSpec, function: Callable[[Session], T]) -> T:
    """What `function` returns for a session of the engine; that of rank 0, where each rank has its own."""
    session, can = engine.session(model, plan, spec), engine.capabilities
    if can.multi_process:
        return run_session_on_ranks(session, function, plan.mesh.size, spec.devices, can.mpi)
    with session as entered:
        return function(entered)
