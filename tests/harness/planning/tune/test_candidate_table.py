"""A search on the terminal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli.compose import compose
from harness.planning.tune import candidate_table
from harness.planning.tune.result import Counts, Reason
from tests.harness.planning.tune.nets import tuned


@pytest.mark.usefixtures("computation")
def test_a_row_has_mesh_recomputation_and_what_it_reaches(tmp_path: Path) -> None:
    found = tuned(tmp_path, "engine=deepspeed", "batch.size=64")
    cells = {column.name: column.cells for column in candidate_table.columns(found.rows)}
    assert [*cells][:4] == ["scheme", "mesh", "micro-batch", "recom-putation"]
    assert cells["mesh"] == [f"{one.pipeline}x{one.data}x{one.tensor}" for one in found.rows]
    assert "tokens/s per device" not in cells and "MFU" not in cells, "samples are no tokens, and no peak is known"
    assert [one.step_time_s for one in found.rows] == sorted(one.step_time_s for one in found.rows)
    assert {one.scheme for one in found.kinds} <= {"deepspeed", *(f"deepspeed zero={zero}" for zero in (1, 2, 3))}


def test_what_the_command_balances_is_in_its_row(tmp_path: Path) -> None:
    """Rows of other stages would look the same, but for their figures."""
    one = tuned(tmp_path, "engine=ddp", "batch.size=64", "batch.micro_batches=8").rows[0]
    other = replace(one, overrides=(*one.overrides, "planner.by=memory"))
    by = {column.name: column.cells for column in candidate_table.columns([one, other])}["stages by"]
    assert by == ["-", "memory"] and "planner.by=memory" in other.command
    assert "stages by" not in [column.name for column in candidate_table.columns([one])]


@pytest.mark.parametrize(("share", "marked"), [(0.89, False), (0.91, True)])
def test_a_peak_that_leaves_no_room_for_an_allocator_is_marked(share: float, marked: bool, tmp_path: Path) -> None:
    row = tuned(tmp_path, "engine=ddp", "batch.size=64", "batch.micro_batches=8").rows[0]
    assert row.memory_limit_bytes == 10**9
    row = replace(row, peak_memory_bytes=int(share * 10**9))
    (cell,) = candidate_table.columns([row])[-1].cells
    assert cell == ("9 % !" if marked else "11 %  ")
    assert sum(text.startswith("!") for text in candidate_table.legend([row])) == marked


def test_a_speed_that_is_an_upper_bound_is_marked(tmp_path: Path) -> None:
    row = tuned(tmp_path, "engine=ddp", "batch.size=64", "batch.micro_batches=8").rows[0]
    assert not row.upper_bound, "layer times were given"
    row = replace(row, samples_per_s=50.0, tokens_per_s_per_device=None, upper_bound=True)
    cells = {column.name: column.cells for column in candidate_table.columns([row])}
    assert cells["samples/s"] == ["<=50"] and "tokens/s per device" not in cells
    assert "<= upper bound: not calibrated" in candidate_table.legend([row])


@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize(
    ("typed", "assumed"),
    [
        (["cluster=flat"], "precision=fp32 (float32), cluster=flat, cluster.values=nominal"),
        (["precision=mixed"], "precision=mixed (float32, matmuls in bfloat16), cluster=local"),
        (["precision.tf32=true"], "precision=fp32 (float32, matmuls in tf32), cluster=local"),
        (["precision=bf16", "cluster=gcp_a100"],
         "precision=bf16 (bfloat16), cluster=gcp_a100, cluster.values=nominal   -> cluster.values=effective"),
        (["cluster=gcp_a100", "cluster.values=effective"],
         "precision=fp32 (float32), cluster=gcp_a100, cluster.values=effective"),
    ],
)  # fmt: skip
def test_what_figures_are_for_is_said(typed: list[str], assumed: str, tmp_path: Path) -> None:
    row = tuned(tmp_path, "engine=ddp", "batch.size=64", "batch.micro_batches=8").rows[0]
    bound = replace(row, upper_bound=True)
    assert candidate_table.assumed(compose(typed), [row, bound]) == f"for {assumed}"
    assert "->" not in candidate_table.assumed(compose(typed), [row])


def test_outcomes_add_up_and_say_why() -> None:
    counts = Counts(3, 4, 0, 2, 1, 0, 8)
    first, *rest = candidate_table.summary(counts, [Reason(1, "engine sbp")], ["fewer than 8 devices not tried"], True)
    assert first.startswith("10 candidates: 3 simulated, 4 slower: their computing alone") and "interrupted" in first
    assert rest == ["1 impossible: engine sbp", "fewer than 8 devices not tried"]


@pytest.mark.usefixtures("computation")
def test_a_tensor_parallel_size_that_splits_samples_only_is_marked(tmp_path: Path) -> None:
    row = tuned(tmp_path, "engine=ddp", "batch.size=64", "batch.micro_batches=8").rows[0]
    samples = replace(row, data=1, tensor=8, splits_samples=True)
    assert not row.splits_samples
    cells = {column.name: column.cells for column in candidate_table.columns([samples, row])}
    assert cells["mesh"] == ["1x1x8 ‡", f"1x{row.data}x1  "]
    assert sum(text.startswith("‡ ") for text in candidate_table.legend([samples, row])) == 1
    assert not any("‡" in text for text in candidate_table.legend([row]))


def test_rows_of_devices_that_are_used(tmp_path: Path) -> None:
    """A layer that takes nearly all of the time, and links that take longer than the others: two devices are idle."""
    typed = ("engine=periodic", "planner=contiguous", "batch.size=16", "batch.micro_batches=8", "mesh.pipeline=4")
    found = tuned(
        tmp_path, *typed, "cluster.nodes=1", "cluster.bandwidth_gb_s=1e-6", forward_s=[1e-6, 1e-1, 1e-6, 1e-6]
    )
    assert {one.pipeline for one in found.rows} == {1} and all("mesh.pipeline=4" in one.command for one in found.rows)
    assert [note.key for note in found.notes if "idle" in note.message] == ["mesh.pipeline"]
