"""Notes below the closing table: what made its figures what they are, and what to change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.config import registry
from harness.core.record import RunRecord
from harness.report.run_notes import notes


def ran(engine: str = "gpipe", source: str = "measured", status: str = "ok", **metrics: Any) -> RunRecord:
    """A run on two CPUs whose computing took three times as long as predicted."""
    found = {"parts_s": {"computing": 0.3}, "first_loss": 2.0, "loss": 1.0, "peak_memory_bytes": [1, 1]}
    found |= {"measured_steps": 10, **metrics}
    config = {"engine": {"name": engine}, "warmup": 2, "optimizer": {"lr": 0.1}}
    predicted, manifest = {"parts_s": {"computing": 0.1}}, {"devices": ["cpu", "cpu"]}
    plan = {"stages": [{"device": 0}, {"device": 1}]}
    return RunRecord("x", status, source, "", config, plan, found, predicted, manifest)


@pytest.mark.parametrize("engine", sorted(name for group, name in registry.schemas() if group == "engine"))
def test_the_lock_of_one_python_is_named_where_devices_are_threads(engine: str) -> None:
    alone = ("single", "delayed")  # which have no second device
    threads = engine in ("gpipe", "torchgpipe", "periodic", *alone)
    assert bool(notes(ran(engine))) == threads
    if threads:
        (text,) = notes(ran(engine))
        assert text.startswith("note: computing took 3.0 times as long as predicted")
        assert ("engine=pipeline" in text) == (engine in ("gpipe", "torchgpipe")) and text.endswith("larger layers")


def test_it_is_not_named_where_something_else_explains_it() -> None:
    (text,) = notes(ran(slowed=2.0))
    assert "busy machine" in text
    assert not notes(ran(parts_s={"computing": 0.14}))
    (text,) = notes(ran(quickest_computing_s=0.14))
    assert text.startswith("note: this run had slow moments: computing took 2.14 times what tasks take in the quickest")
    assert not notes(ran(parts_s={"computing": 0.11}, quickest_computing_s=0.05)), "no longer than predicted"
    both = notes(ran(quickest_computing_s=0.2))
    assert len(both) == 2 and "2.0 times as long as predicted, even in its quickest steps" in both[1]
    short = ran(quickest_computing_s=0.14)
    short.manifest["simulation"] = {"lock_share": 0.3}
    assert "3.0 times as long as predicted: on CPUs" in notes(short)[1], "layers that are known to wait for the lock"
    analytic, bound = ran(), ran()
    analytic.config["costs"], bound.manifest["simulation"] = "analytic", {"upper_bound": True}
    for one in (analytic, bound):
        assert not notes(one)
        one.metrics["quickest_computing_s"] = 0.14
        assert not notes(one), "longer than predicted says nothing"
    one, gpus = replace(ran(), plan={"stages": [{"device": 0}, {"device": 0}]}), ran()
    gpus.manifest["devices"] = ["cuda:0", "cuda:1"]
    assert not notes(one) and not notes(gpus) and not notes(ran("of another version"))


@pytest.mark.parametrize(("last", "said"), [(2.3, False), (2.5, True), (1.0, False)])
def test_a_loss_that_rises(last: float, said: bool) -> None:
    rose = f"note: the loss rose, from 2.0000 to {last:.4f}   -> optimizer.lr=0.01"
    assert notes(ran("ddp", loss=last)) == ([rose] if said else [])
    assert not notes(ran("ddp", loss=last, measured_steps=3)), "batches differ"
    assert not notes(ran("ddp", first_loss=1e-9, loss=1e-8)), "nothing is left to learn"


def test_memory_that_was_not_metered() -> None:
    one = ran("ddp", peak_memory_bytes=None)
    assert not notes(one), "two warm-up steps: the engine does not say"
    one.config["warmup"] = 1
    assert notes(one) == ["note: no peak memory: it is metered in the last of 2 or more warm-up steps   -> warmup=2"]


def test_only_measured_runs_that_ended_well_have_notes() -> None:
    assert not notes(ran(source="simulated", loss=9.0)) and not notes(ran(status="error", loss=9.0))
