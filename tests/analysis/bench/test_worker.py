"""The process of a benchmark entry: what happens when it fails, hangs or is killed."""

from __future__ import annotations

import math
from multiprocessing import get_context

import pytest

from analysis.bench import worker
from analysis.bench.worker import Entry, EntryProcess
from harness.interfaces import Batch
from tests.analysis.bench.stumbling import alive, fails, hangs, nothing_left, stumbles

pytestmark = pytest.mark.usefixtures("commands")


def test_steps_until_it_is_let_go(entries: dict[str, Entry], batch: Batch) -> None:
    before = alive()
    with EntryProcess(entries["ddp"], batch) as one:
        assert len(alive() - before) == 3  # its process and two ranks
        assert 0 < one.step() < 60
        assert one.peak_bytes()
    assert one.process.exitcode == 0
    assert not one.failed


def test_one_that_has_failed_is_gone_at_once_and_only_says_so(
    entries: dict[str, Entry], batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not continue computing next to the others."""
    monkeypatch.setattr(worker, "PATIENCE_S", 5.0)
    with nothing_left(), EntryProcess(stumbles(entries["ddp"], hangs, at=0), batch) as one, nothing_left():
        assert math.isnan(one.step())
    assert one.failed == "failed in its warm-up: no answer in 5 s"
    assert math.isnan(one.step())
    assert one.peak_bytes() is None
    assert one.failed == "failed in its warm-up: no answer in 5 s"


def test_an_error_of_the_bench_ends_all(entries: dict[str, Entry], batch: Batch) -> None:
    before = alive()
    with (
        pytest.raises(ZeroDivisionError),
        nothing_left(),
        EntryProcess(entries["gpipe"], batch),
        EntryProcess(stumbles(entries["ddp"], fails, 0), batch),
    ):
        assert len(alive() - before) == 4
        raise ZeroDivisionError


def test_all_end_where_the_bench_is_killed(entries: dict[str, Entry], batch: Batch) -> None:
    fork = get_context("fork")
    here, there = fork.Pipe(duplex=False)

    def bench() -> None:
        with EntryProcess(entries["single"], batch), EntryProcess(entries["ddp"], batch) as one:
            there.send(one.step())
            hangs()

    before = alive()
    with nothing_left():
        process = fork.Process(target=bench)
        process.start()
        assert here.poll(60) and here.recv() > 0
        assert len(alive() - before) == 5
        process.kill()
        process.join()
