"""A search in several processes finds what one process finds; a process that ends early loses nothing else."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli.compose import compose
from harness.core.problem import CannotRun
from harness.planning.draft import Draft
from harness.planning.tune import parallel_search
from harness.planning.tune.result import Line, Tuned, as_csv
from harness.report.progress import Progress
from tests.harness.planning.tune.nets import FLAT, Nets

TYPED = ["mode=tune", *FLAT, "engine=deepspeed", "batch.size=16"]
HERE = os.getpid()


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_search, "LARGE", 10)
    monkeypatch.setattr(parallel_search.devices, "cores", lambda: 2)


class Several(Nets):
    """A search that has to be one in several processes: its own one simulates nothing."""

    def simulation(self, line: Line, best_s: float = 0.0) -> tuple[Line, Draft | None]:
        assert os.getpid() != HERE
        return super().simulation(line, best_s)


def searched(kind: type[Nets], folder: Path, *typed: str) -> Tuned:
    overrides = [*TYPED, *typed]
    return kind(compose(overrides), overrides, folder, Progress()).search()


def said(found: Tuned) -> tuple[object, ...]:
    """All that is printed and recorded of a search."""
    return as_csv(found.lines), found.kinds, found.rows, found.counts, found.impossible, found.left_out, found.metrics()


@pytest.mark.parametrize("memory_gb", [1, pytest.param(0.02, marks=pytest.mark.full)])
def test_as_one_process(memory_gb: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    several = searched(Several, tmp_path, f"cluster.memory_gb={memory_gb}")
    monkeypatch.setattr(parallel_search, "LARGE", 10**9)
    assert said(several) == said(searched(Nets, tmp_path, f"cluster.memory_gb={memory_gb}"))
    assert len(several.kinds) > 1


@pytest.mark.full
@pytest.mark.parametrize("typed", ["planner=megatron", "cluster.memory_gb=0.001"])
def test_the_reason_why_nothing_is_possible(typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CannotRun) as several:
        searched(Nets, tmp_path, typed)
    monkeypatch.setattr(parallel_search, "LARGE", 10**9)
    with pytest.raises(CannotRun) as one:
        searched(Nets, tmp_path, typed)
    assert str(several.value) == str(one.value)


@pytest.mark.full
def test_a_killed_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was at is looked at again, in the process of the search."""

    class Killed(Nets):
        def simulation(self, line: Line, best_s: float = 0.0) -> tuple[Line, Draft | None]:
            if os.getpid() != HERE and "zero" in str(line.candidate.settings):
                os.kill(os.getpid(), signal.SIGKILL)
            return super().simulation(line, best_s)

    killed = searched(Killed, tmp_path)
    monkeypatch.setattr(parallel_search, "LARGE", 10**9)
    assert said(killed) == said(searched(Nets, tmp_path))


def test_an_interrupted_search_keeps_what_its_processes_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Impatient(Several):
        def show(self, listed: int, planned: int, simulated: int, best_s: Mapping[str, float]) -> None:
            if best_s:
                raise KeyboardInterrupt

        def simulation(self, line: Line, best_s: float = 0.0) -> tuple[Line, Draft | None]:
            if "zero" in str(line.candidate.settings):
                signal.pause()  # and ends for no signal of the user
            time.sleep(0.7)
            return super().simulation(line, best_s)

    monkeypatch.setattr(parallel_search, "STOP_S", 1.0)
    try:
        found = searched(Impatient, tmp_path)
    except KeyboardInterrupt:
        pytest.fail("nothing that was found is left")
    assert found.interrupted and [one.scheme for one in found.kinds] == ["deepspeed"]
    assert not multiprocessing.active_children()


def test_the_error_of_a_process_is_that_of_the_search(tmp_path: Path) -> None:
    class Faulty(Several):
        def simulation(self, line: Line, best_s: float = 0.0) -> tuple[Line, Draft | None]:
            raise ZeroDivisionError(f"at {replace(line.candidate, settings=())}")

    with pytest.raises(ZeroDivisionError, match="at Candidate"):
        searched(Faulty, tmp_path)
    assert not multiprocessing.active_children()
