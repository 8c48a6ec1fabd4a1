"""What distinguishes runs that are compared."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from harness.core.record import RunRecord
from harness.report.comparison import (
    busy_machine,
    busy_profile,
    disturbed_machine,
    micro_batch_size,
    notes,
    speeds_over_single,
    unequal_losses,
    unequal_micro_batches,
    unequal_recomputation,
)

SAMPLES = 16


def ran(name: str, speed: float, replicas: int = 1, count: int = 8, **changes: Any) -> RunRecord:
    config = {
        "engine": {"name": name}, "mode": "run", "batch": {"size": SAMPLES, "micro_batches": count},
        "model": {"name": "unet", "size": 64}, "data": {"name": "synthetic"}, "precision": {"name": "fp32"},
        "cluster": {"name": "local", "devices": None}, "seed": 0, "planner": {"name": "balance"},
    }  # fmt: skip
    config |= {key: changes.pop(key) for key in list(changes) if key in (*config, "profile")}
    plan = {"mesh": {"data": replicas, "pipeline": 1, "tensor": 1}, "micro_batches": count}
    fields = {"config": config, "plan": plan, "metrics": {"throughput": speed}, "manifest": {"machine": {"cpu": "A"}}}
    return RunRecord("x", **{"status": "ok", **fields, **changes})


def test_the_reference_is_the_run_on_one_device() -> None:
    others = (ran("gpipe", 15.0), ran("ddp", 5.0, planner={"name": "uniform"}, cluster={"name": "local", "devices": 4}))
    assert speeds_over_single([others[0], ran("single", 10.0), None, others[1]]) == [1.5, 1.0, None, 0.5]
    assert speeds_over_single(others) == [None, None]


@pytest.mark.parametrize(
    "other",
    [
        {"model": {"name": "unet", "size": 128}},
        {"data": {"name": "images"}},
        {"precision": {"name": "bf16"}},
        {"batch": {"size": 32, "micro_batches": 8}},
        {"cluster": {"name": "local", "devices": None, "bandwidth_gb_s": 1}},
        {"mode": "simulate"},
        {"profile": "mine.json"},
        {"source": "simulated"},
        {"manifest": {"machine": {"cpu": "B"}}},
        {"status": "oom"},
        {"metrics": {}},
    ],
    ids=lambda other: next(iter(other)),
)
def test_other_work_is_not_compared(other: dict[str, Any]) -> None:
    assert speeds_over_single([ran("single", 10.0, **other), ran("gpipe", 15.0)])[1] is None
    assert speeds_over_single([ran("single", 10.0), ran("gpipe", 15.0, **other)])[1] is None


def test_simulated_is_not_compared_with_measured() -> None:
    """Also where nothing is known of the machine."""
    runs = [ran("single", 10.0, source="simulated", manifest={}), ran("gpipe", 15.0, manifest={})]
    assert speeds_over_single(runs) == [1.0, None]


def test_of_several_references_that_with_the_same_keys_counts() -> None:
    singles = [ran("single", 10.0, count=4), ran("single", 20.0, count=8)]
    assert speeds_over_single([*singles, ran("gpipe", 40.0, count=8), ran("gpipe", 40.0, count=4)])[2:] == [2.0, 4.0]
    assert speeds_over_single([*singles, ran("ddp", 40.0, count=2)])[2] is None
    twice = [ran("single", 10.0), ran("single", 20.0, engine={"name": "single", "checkpoint": "always"})]
    assert speeds_over_single([*twice, ran("gpipe", 40.0)]) == [None, None, None]


def test_a_reference_is_of_the_same_sweep() -> None:
    runs = [ran("single", 10.0), ran("gpipe", 15.0), ran("single", 20.0), ran("gpipe", 15.0)]
    assert speeds_over_single(runs, ["a", "a", "b", "c"]) == [1.0, 1.5, 1.0, None]


def test_replicas_split_a_micro_batch() -> None:
    assert [micro_batch_size(ran("ddp", 1.0, replicas)) for replicas in (1, 2)] == [2, 1]
    assert micro_batch_size(RunRecord("x", "infeasible")) is None


def test_a_note_gives_the_keys_that_make_micro_batches_equal() -> None:
    runs = [ran("single", 1.0), None, ran("ddp", 1.0, 2), RunRecord("x", "infeasible")]
    note = unequal_micro_batches(runs)
    assert note.startswith("micro-batches have 1 and 2 samples")
    assert note.endswith("   -> batch.micro_batches=4 where mesh.data=2")
    assert not unequal_micro_batches([ran("single", 1.0), ran("ddp", 1.0, 2, 4)]), "these are equal"
    assert not unequal_micro_batches([ran("single", 1.0, count=4), ran("single", 1.0, count=8)]), "as the user wants"
    tuned = [ran("single", 1.0, mode="tune"), ran("ddp", 1.0, 2, mode="tune")]
    assert not unequal_micro_batches(tuned), "chosen by the search"


def recomputing(name: str, **keys: str) -> RunRecord:
    return ran(name, 1.0, engine={"name": name, **keys})


def test_a_note_gives_the_key_that_makes_recomputation_equal() -> None:
    gpipe, ddp, single = (
        recomputing("gpipe", checkpoint="except_last"), recomputing("ddp"), recomputing("single", checkpoint="never")
    )  # fmt: skip
    note = unequal_recomputation([single, None, gpipe, ddp, RunRecord("x", "infeasible")])
    assert note.startswith("activations are recomputed by gpipe (checkpoint=except_last), not by single, ddp: ")
    assert note.endswith("   -> engine.checkpoint=never where engine=gpipe")
    assert not unequal_recomputation([single, ddp]), "none does"
    assert not unequal_recomputation([gpipe, recomputing("gpipe", checkpoint="never")]), "as the user wants"
    same = recomputing("torchgpipe", checkpoint="except_last")
    assert not unequal_recomputation([gpipe, same]), "both do the same"
    assert "engine.checkpoint_every=never where engine=myelin" in unequal_recomputation(
        [ddp, recomputing("myelin", checkpoint_every="1")]
    )
    assert not unequal_recomputation([ddp, ran("gpipe", 1.0, engine=gpipe.config["engine"], profile="mine.json")])


def trained(name: str, loss: float | None, **changes: Any) -> RunRecord:
    return ran(name, 1.0, metrics={"loss": loss, "throughput": 1.0}, **changes)


def test_losses_that_differ_are_noted() -> None:
    single, fsdp = trained("single", 4.46), trained("fsdp", 4.37, replicas=2, planner={"name": "uniform"})
    note = unequal_losses([trained("gpipe", 4.45), single, None, fsdp])
    assert note.startswith("the last losses differ by 2.0 % (fsdp 4.3700, single 4.4600): ")
    assert notes([single, fsdp])[0] == note
    assert unequal_losses([single, trained("fsdp", 4.37), trained("fsdp", 4.4601)]) == note, "also of an engine twice"
    assert not unequal_losses([single, trained("fsdp", 4.45)])
    assert not unequal_losses([single, trained("single", 4.2)]), "one engine, twice"
    assert not unequal_losses([single, trained("fsdp", 4.2, seed=1)]), "other weights"
    assert not unequal_losses([single, trained("fsdp", 4.2, status="timeout"), trained("ddp", None)])
    assert not unequal_losses([single, trained("fsdp", math.inf), trained("ddp", 2.2, source="simulated")])
    assert not unequal_losses([single, trained("periodic", 4.2, plan={"pattern": {"period": 1.0}})])
    assert not unequal_losses([trained("single", 1e-9), trained("fsdp", 1e-6)]), "both are none"


@pytest.mark.parametrize(("slowed", "busy"), [(None, False), (1.19, False), (1.2, True)])
def test_steps_that_waited_for_cores_are_noted(slowed: float | None, busy: bool) -> None:
    one = ran("gpipe", 1.0, metrics={"slowed": slowed})
    assert busy_machine([one]).startswith("this run had a busy machine: steps took 1.20 times") == busy
    others = [None, ran("single", 1.0, metrics={"slowed": 3.0}), ran("ddp", 1.0), RunRecord("x", "oom")]
    wanted = "2 of 3 runs had a busy machine: steps took 1.20 to 3.00" if busy else "1 of 3 runs had a busy machine"
    assert busy_machine([one, *others]).startswith(wanted)
    assert not busy_machine([ran("gpipe", 1.0, metrics={"slowed": 3.0}, source="simulated")])


@pytest.mark.parametrize(
    ("quick_s", "predicted_s", "noted"), [(1.0, 1.0, True), (1.01, 0.5, False), (0.5, 1.01, False), (None, 0.5, False)]
)
def test_steps_with_slow_moments_are_noted(quick_s: float | None, predicted_s: float, noted: bool) -> None:
    """Computing takes 1.2 s."""

    def moments(quick_s: float | None, predicted_s: float, **metrics: Any) -> RunRecord:
        found = {"parts_s": {"computing": 1.2}, "quickest_computing_s": quick_s, **metrics}
        return replace(ran("gpipe", 1.0, metrics=found), predicted={"parts_s": {"computing": predicted_s}})

    one = moments(quick_s, predicted_s)
    own = "this run had slow moments: computing took 1.20 times what tasks"
    assert disturbed_machine([one]).startswith(own) == noted
    others = [None, moments(0.4, 0.4), moments(0.4, 0.4, slowed=2.0), ran("ddp", 1.0), RunRecord("x", "oom")]
    wanted = "2 of 4 runs had slow moments: computing took 1.20 to 3.00 times what tasks"
    alone = "1 of 4 runs had slow moments: computing took 3.00 times what tasks"
    assert disturbed_machine([one, *others]).startswith(wanted if noted else alone)


@pytest.mark.parametrize(("slowed", "costs", "busy"), [(1.19, "measured", False), (1.2, "measured", True),
                                                        (1.2, "scaled", True), (1.2, "as given", False)])  # fmt: skip
def test_predictions_of_slow_layer_times_are_noted(slowed: float, costs: str, busy: bool) -> None:
    def predicted(slowed: float, costs: str) -> RunRecord:
        return ran("gpipe", 1.0, manifest={"simulation": {"slowed": slowed, "costs": costs}})

    text = busy_profile([predicted(slowed, costs)])
    assert text.startswith("the prediction is of layer times measured on a busy machine, about 1.20 times") == busy
    others = [None, predicted(3.0, "measured"), predicted(1.0, "measured"), ran("ddp", 1.0)]
    number, factors = ("2 of 3", "1.20 to 3.00") if busy else ("1 of 3" if costs == "measured" else "1 of 2", "3.00")
    assert busy_profile([predicted(slowed, costs), *others]).startswith(f"{number} predictions are of layer times ")
    assert f"about {factors} times" in busy_profile([predicted(slowed, costs), *others])
