"""What runs with what, each cell a run of one step: `make matrix` writes docs/matrix.md, in about an hour.

`make matrix ARGS="--engine delayed pipeline"` runs the rows of these engines alone, and `--planner` those of planners;
the other rows of the page stay as they are, with notes that are numbered again.

    engines, as they are          x models                 x meshes   with planner=balance (periodic: contiguous)
    engines, with another setting x three different models    x meshes   with planner=balance
    planners of stages            x models                 x stages   with engine=gpipe
    planners of products          x models                 x shards   with engine=sbp

A cell is "ok" or the first problem that the run named. Any other end is broken, an error of the project.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from engines.deepspeed.engine import STAGES
from engines.torch_pipelining.engine import SCHEDULES
from harness.config import registry
from harness.core import files
from harness.core.problem import advice
from harness.core.record import RunRecord
from harness.schedule.families import FAMILIES
from harness.sweep import run_point
from harness.sweep.points import Point
from harness.sweep.row import Row

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "matrix.md"
SMALL = ("steps=1", "warmup=0", "batch.size=8", "batch.micro_batches=2", "tracker=none", "cluster.devices=4")
WORKERS = 2
COMPOSING = threading.Lock()
"""Hydra composes one configuration at a time."""

Choice = tuple[str, ...]
"""Some of a run's keys."""
PLANNED: Choice = ("planner=balance",)
PATTERNED: Choice = ("planner=contiguous",)
EXECUTED: Choice = ("engine=gpipe",)
MESHES: tuple[Choice, ...] = (
    ("mesh.pipeline=1", "mesh.data=1"),
    ("mesh.pipeline=2", "mesh.data=1"),
    ("mesh.pipeline=4", "mesh.data=1"),
    ("mesh.pipeline=1", "mesh.data=2"),
    ("mesh.pipeline=2", "mesh.data=2"),
)
"""Every degree is given: an engine of replicas would fill the devices."""
CUT = MESHES[1:3]
"""Where a planner has something to decide."""
SETTINGS = {
    "deepspeed": [f"engine.zero={stage}" for stage in STAGES[1:]],
    "torch_pipelining": [f"engine.schedule={name}" for name in SCHEDULES[1:]],
    "pipeline": [f"engine.schedule={name}" for name in FAMILIES if name != "1f1b"],
}
"""What else an engine runs; the first of these is its default."""
DIFFERENT = ("amoebanet", "gpt", "unet")
"""Pairs of tensors, tied weights, skips: what an engine may stumble over."""
NEED_MORE = ("given", "strategies")
"""Planners that run nothing without further keys of the user's."""
SHARDS: tuple[Choice, ...] = (
    ("mesh.pipeline=1", "mesh.tensor=2"),
    ("mesh.pipeline=1", "mesh.tensor=4"),
    ("mesh.pipeline=2", "mesh.tensor=2"),
)
SHARDING: Choice = ("engine=sbp",)
"""What runs the plans of planners that split products."""


@dataclass(frozen=True)
class End:
    """How a run ended, and what it said if not well."""

    status: str
    said: str = ""

    @property
    def broken(self) -> bool:
        return self.status not in ("ok", "infeasible")

    @classmethod
    def of_note(cls, note: str, broken: bool) -> End:
        """What a note of the page says: after the status of a broken run, its mesh left out."""
        status, said = note.split(", ", 1) if broken else ("infeasible", note)
        return cls(status, said)


def names(group: str) -> list[str]:
    """The plug-ins of a group; each model's small preset has its plug-in's name."""
    found = sorted(plugin.name for plugin in registry.scan() if plugin.group == group)
    return [name for name in found if name not in NEED_MORE]


def of_engines() -> Iterable[Choice]:
    """Neighbours are of different models, so that two workers seldom measure the same one."""
    for name, mesh, model in itertools.product(names("engine"), MESHES, names("model")):
        planned = PATTERNED if name == "periodic" else PLANNED
        yield f"engine={name}", *planned, f"model={model}", *mesh
    for name, settings in SETTINGS.items():
        for setting, mesh, model in itertools.product(settings, MESHES, DIFFERENT):
            yield f"engine={name} {setting}", *PLANNED, f"model={model}", *mesh


def of_planners() -> Iterable[Choice]:
    others = [
        name for name in names("planner") if f"planner={name}" not in PLANNED and not registry.splits_matmuls(name)
    ]
    for name, mesh, model in itertools.product(others, CUT, names("model")):
        yield f"planner={name}", *EXECUTED, f"model={model}", *mesh


def of_products() -> Iterable[Choice]:
    for name, mesh, model in itertools.product(
        filter(registry.splits_matmuls, names("planner")), SHARDS, names("model")
    ):
        yield f"planner={name}", *SHARDING, f"model={model}", *mesh


def run(cell: Choice) -> End:
    """Run it, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return run_in(Path(folder) / "run", [*" ".join(cell).split(), *SMALL])


def run_in(folder: Path, overrides: Sequence[str]) -> End:
    """Run these keys as a point of a sweep. There is no folder if they are refused before."""
    row = Row(Point.of(overrides))
    with COMPOSING:
        config = run_point.composed(row.point)
    if isinstance(config, RunRecord):
        return end(config)
    run_point.run_point(row, folder, config)
    assert row.record is not None
    return end(row.record)


def end(record: RunRecord) -> End:
    """How a run ended; of a refusal the first problem."""
    if record.status == "ok":
        return End("ok")
    if record.status == "infeasible" and record.problems:
        problem, fixes = record.problems[0], advice(record.problems[0])
        return End("infeasible", f"{problem.subject}: {problem.message}" + (f" -> {fixes}" if fixes else ""))
    return End(record.status, record.reason)


def page(
    engines: Mapping[Choice, End], planners: Mapping[Choice, End], products: Mapping[Choice, End], missing: int = 0
) -> str:
    """The Markdown page: three tables, and notes that all of them refer to; how many cells are `missing`."""
    notes: list[str] = []
    lines = [
        "# What runs with what", "",
        "Made by `make matrix`: each cell was run for one step on four CPU devices, with small presets. Models whose",
        "cells are equal share a row. A number is a refusal; the notes have its reason and its fix.", "",
        *([f"{missing} cells have not been run: what is in no row.", ""] if missing else []),
        "With `planner=balance`, `periodic` with `planner=contiguous`, since it runs patterns alone; engines with",
        "another setting than their own on three different models:", "",
        *table(engines, MESHES, notes), "",
        "The other planners of stages, with `engine=gpipe`:", "",
        *table(planners, CUT, notes), "",
        "Tensor-parallel planners, with `engine=sbp`:", "",
        *table(products, SHARDS, notes),
    ]  # fmt: skip
    if notes:
        lines += ["", "Notes:", "", *(f"{number}. `{note}`" for number, note in enumerate(notes, start=1))]
    return "\n".join(lines) + "\n"


def table(cells: Mapping[Choice, End], meshes: Sequence[Choice], notes: list[str]) -> list[str]:
    """A row for each choice and the models that end in the same way; adds what they said to `notes`."""
    rows: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for first, second, model in sorted(dict.fromkeys(key[:3] for key in cells)):
        ends = tuple(_short(cells[first, second, model, *mesh], notes) for mesh in meshes)
        rows.setdefault((first, ends), []).append(model.partition("=")[2])
    heads = ["", "models", *map(_head, meshes)]
    body = [[f"`{first}`", ", ".join(models), *ends] for (first, ends), models in rows.items()]
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *body)]


def _head(mesh: Choice) -> str:
    """The head of a column."""
    return " ".join(mesh).replace("mesh.", "")


def _short(ended: End, notes: list[str]) -> str:
    """What stands in a cell; the mesh of a refusal is the column's."""
    if ended.status == "ok":
        return "ok"
    note = f"{ended.status}, {ended.said}" if ended.broken else re.sub(r"^mesh\.\w+ \d+: ", "", ended.said)
    if note not in notes:
        notes.append(note)
    number = f"({notes.index(note) + 1})"
    return f"**broken** {number}" if ended.broken else number


NOTE = re.compile(r"(\d+)\. `(.*)`")


def read(written: str, jobs: Iterable[Choice]) -> dict[Choice, End]:
    """What a page says of these cells, as far as it has them."""
    notes = {number: note for line in written.splitlines() for number, note in NOTE.findall(line)}
    found: dict[tuple[str, ...], End] = {}
    heads: list[str] = []
    for row in ([cell.strip() for cell in line.split("|")[1:-1]] for line in written.splitlines() if line[:1] == "|"):
        if not row[0]:
            heads = row[2:]
        for model, (mesh, text) in itertools.product(row[1].split(", "), zip(heads, row[2:], strict=True)):
            if text == "ok":
                found[row[0].strip("`"), model, mesh] = End("ok")
            elif number := re.search(r"\((\d+)\)", text):
                found[row[0].strip("`"), model, mesh] = End.of_note(notes[number[1]], text.startswith("**"))
    keys = {job: (job[0], job[2].partition("=")[2], _head(job[3:])) for job in jobs}
    return {job: found[key] for job, key in keys.items() if key in found}


def chosen(cell: Choice, wanted: Sequence[str]) -> bool:
    """Whether its row is of one of the engines or planners that are wanted: engine=pipeline, planner=uniform."""
    return not wanted or cell[0].split()[0] in wanted


def measured(jobs: Sequence[Choice]) -> Iterable[tuple[Choice, End]]:
    """Run these cells, several at a time, and say of each how it ended."""
    with ThreadPoolExecutor(WORKERS) as workers:
        for number, (cell, ended) in enumerate(zip(jobs, workers.map(run, jobs), strict=True), start=1):
            print(f"{number}/{len(jobs)} {' '.join(cell)} -> {ended.status} {ended.said}".rstrip(), flush=True)
            yield cell, ended


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m tests.matrix", description=(__doc__ or "").split("\n")[0])
    for group in ("engine", "planner"):
        own = [name for name in names(group) if f"{group}={name}" not in PLANNED]
        parser.add_argument(f"--{group}", nargs="+", choices=own, default=[], help=f"rows of these {group}s")
    options = parser.parse_args(arguments)
    wanted = [*(f"engine={name}" for name in options.engine), *(f"planner={name}" for name in options.planner)]
    written = PAGE.read_text(encoding="utf-8") if wanted else ""
    parts: list[dict[Choice, End]] = []
    missing = 0
    ran: dict[Choice, End] = {}
    for jobs in (list(of_engines()), list(of_planners()), list(of_products())):
        ran |= (own := dict(measured([job for job in jobs if chosen(job, wanted)])))
        parts.append(read(written, jobs) | own)
        missing += len(jobs) - len(parts[-1])
    engines, planners, products = parts
    files.write_text(PAGE, page(engines, planners, products, missing))
    broken = sum(ended.broken for ended in ran.values())
    print(f"{len(ran)} cells, {broken} broken; written to {PAGE}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
