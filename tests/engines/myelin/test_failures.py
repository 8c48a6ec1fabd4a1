"""Ranks that raise or are killed in the middle of a step: all end soon, the first error is reported, nothing stays."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch.distributed as dist
from torch import Tensor

from engines.myelin.session import MyelinSession
from harness.launch.forked_ranks import RankKilled
from tests.engines import networks
from tests.engines.myelin.cases import case
from tests.engines.networks import Network
from tests.support.processes import children, left_in_shared_memory, shared_memory
from tests.support.sessions import run_session

pytestmark = pytest.mark.usefixtures("ranks")

SOON_S = 10.0
M = 4


@pytest.fixture(autouse=True)
def nothing_stays() -> Any:
    files, processes, began = shared_memory(), children(), time.monotonic()
    yield
    assert time.monotonic() - began < SOON_S
    assert children() <= processes
    assert left_in_shared_memory(files) == set()


def failing(transport: str, rank: int, at: int, forward: bool, what: Callable[[], object]) -> None:
    """Train on 2 stages x 2 replicas; in the second step `rank` does `what` in its pass number `at`."""
    one = case("pairs", 2, 2, m=M, transport=transport)

    def train(session: Any) -> None:
        assert isinstance(session, MyelinSession)
        batch = one.model.sample(8)
        session.step(batch)
        if dist.get_rank() == rank:
            layer = list(session.stage)[1]
            passes = [0]

            def passing(*_: Any) -> None:
                passes[0] += 1
                if passes[0] == at + 1:
                    what()

            if forward:
                layer.register_forward_hook(passing)
            else:
                layer.register_forward_hook(lambda module, inputs, out: hooked(out, passing))
        session.step(batch)

    run_session(one.engine, one.model, one.plan, one.spec, train)


def hooked(out: Any, hook: Callable[[Tensor], None]) -> None:
    (out if isinstance(out, Tensor) else out[0]).register_hook(hook)


def boom(*_: Any) -> NoReturn:
    raise ArithmeticError("on purpose")


@pytest.mark.parametrize(
    ("transport", "rank", "forward"),
    [("torch", 0, True), ("torch", 1, False), ("torch", 3, True), ("mpi", 2, False)],
)
def test_the_first_error_with_its_place(transport: str, rank: int, forward: bool) -> None:
    at = 2
    with pytest.raises(ArithmeticError, match="on purpose") as caught:
        failing(transport, rank, at, forward, boom)
    phase, number = "forward" if forward else "backward", rank // 2 * M + at
    assert f"in rank {rank}, stage {rank % 2}, in the {phase} pass of micro-batch {number}" in caught.value.__notes__


@pytest.mark.parametrize(("transport", "rank"), [("torch", 0), ("torch", 3), ("mpi", 3)])
def test_a_rank_that_is_killed(transport: str, rank: int) -> None:
    """It says nothing more; the host has seen where it was."""
    with pytest.raises(RankKilled, match=f"rank {rank} was killed") as caught:
        failing(transport, rank, 1, True, lambda: os.kill(os.getpid(), signal.SIGKILL))
    where = f"in rank {rank}, stage {rank % 2}, in the forward pass of micro-batch {rank // 2 * M + 1}"
    assert caught.value.__notes__ == [where]


def test_an_error_at_the_end_of_a_step() -> None:
    one = case("pairs", 2, m=2)

    def train(session: Any) -> None:
        if dist.get_rank() == 1:
            session.updates.finish = boom
        session.step(one.model.sample(8))

    with pytest.raises(ArithmeticError) as caught:
        run_session(one.engine, one.model, one.plan, one.spec, train)
    assert caught.value.__notes__ == ["in rank 1, stage 1, between the passes of a step"]


@pytest.mark.parametrize(
    ("part", "where"),
    [
        ("recording.add", "in the report of a step"),
        ("updates.state", "while the state is gathered"),
        ("updates.load", "while a state is loaded"),
    ],
)
def test_an_error_outside_of_a_step_says_where(part: str, where: str) -> None:
    one = case("pairs", 2, m=2)

    def train(session: Any) -> None:
        if dist.get_rank() == 1:
            owner, name = part.split(".")
            setattr(getattr(session, owner), name, boom)
        session.step(one.model.sample(8))
        states = [session.state_dict()]
        dist.broadcast_object_list(states)
        session.load_state_dict(states[0])

    with pytest.raises(ArithmeticError) as caught:
        run_session(one.engine, one.model, one.plan, one.spec, train)
    assert caught.value.__notes__ == [f"in rank 1, stage 1, {where}"]


def test_an_error_before_the_first_step_says_where() -> None:
    class Unbuildable(Network):
        def layers(self) -> Any:
            if dist.is_initialized() and dist.get_rank() == 1:
                boom()
            return super().layers()

    pairs = networks.pairs()
    one = case(Unbuildable("none", pairs._layers, pairs._inputs, pairs._targets, pairs._loss), 2, m=2)
    with pytest.raises(ArithmeticError) as caught:
        run_session(one.engine, one.model, one.plan, one.spec, lambda session: None)
    assert caught.value.__notes__ == ["in rank 1, stage 1, while the session is built"]


def test_waiting_ranks_do_not_spin() -> None:
    """Seconds of CPU over seconds of a step, in the second stage, while a layer of the first one sleeps."""
    one = case("pairs", 2, m=2, transport="mpi")

    def train(session: Any) -> float:
        batch = one.model.sample(8)
        session.step(batch)
        if dist.get_rank() == 0:
            session.stage.register_forward_pre_hook(lambda *_: time.sleep(0.5))
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        session.step(batch)
        shares = [0.0, 0.0]
        own = (time.process_time() - cpu_s) / (time.perf_counter() - wall_s)
        dist.all_gather_object(shares, own)
        return shares[1]

    assert run_session(one.engine, one.model, one.plan, one.spec, train) < 0.3
