"""A search on the terminal."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from harness.planning.tune import candidate_table
from harness.planning.tune.result import Tuned
from tests.harness.planning.tune.nets import tuned


def cells(found: Tuned) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=250, record=True)
    console.print(candidate_table.simulated(found))
    return [re.split(r" {2,}", line.strip()) for line in console.export_text().splitlines()]


def test_degrees_are_in_the_order_of_a_mesh(tmp_path: Path) -> None:
    found = tuned(tmp_path, "engine=myelin", "batch.size=64")
    title, *rows = cells(found)
    assert title[2:5] == ["pipeline", "data", "tensor"]
    meshes = [line.candidate.mesh for line in found.simulated]
    assert [row[2:5] for row in rows] == [[str(mesh.pipeline), str(mesh.data), str(mesh.tensor)] for mesh in meshes]


@pytest.mark.parametrize(("share", "marked"), [(0.89, False), (0.91, True)])
def test_a_peak_that_leaves_no_room_for_an_allocator_is_marked(share: float, marked: bool, tmp_path: Path) -> None:
    found = tuned(tmp_path, "engine=ddp", "batch.size=64", "batch.micro_batches=8")
    (line,) = found.simulated
    assert line.memory_limit_bytes == 10**9
    line = replace(line, simulated_memory_bytes=int(share * 10**9))
    title, row = cells(replace(found, lines=(line,), best=line))
    assert title[-1] == "memory, simulated, of 953.7 MiB"
    assert row[-1].endswith(" !") == marked
    footnotes = [text for text in candidate_table.reported(replace(found, lines=(line,), best=line)) if text[0] == "!"]
    assert len(footnotes) == marked
    assert all("above 90 % of a device's memory" in text for text in footnotes)
