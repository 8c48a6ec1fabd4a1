"""`python run.py mode=fit model=... cluster=...`: the memory of the fullest device of each scheme, with and without
recomputation, in each precision, and how much of a device that leaves. Nothing is trained, and no weights are made.

The bytes are those of mode=tune: the same plans, in the same simulator. Of each scheme it is the mesh of all devices
that needs the least, with the smallest micro-batches, unless the user gives mesh.* or batch.*.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console
from rich.text import Text

from harness.cli.compose import compose
from harness.core import files
from harness.core.problem import CannotRun, NoPlan, Problem, bare_key, refuse
from harness.core.record import EXIT_CODES
from harness.core.run_files import CONFIG
from harness.core.units import UNKNOWN, percent, size
from harness.core.value_checks import one_of
from harness.launch.signals import blocked, preemptible
from harness.launch.supervisor import WorkerFailed
from harness.planning.tune import extrapolate
from harness.planning.tune.candidate_search import Block, Tuner
from harness.planning.tune.candidate_table import UNTRAINED, UNTRAINED_LEGEND
from harness.planning.tune.outcome import is_simulated_only
from harness.planning.tune.result import Line
from harness.report.columns import MESH_LEGEND, Column, drawn, mesh_text
from harness.report.progress import Progress
from harness.sweep import engines
from harness.sweep.table import console_of_sweep

FIT = "mode=fit"
PRECISIONS = ("fp32", "mixed", "bf16")
"""Those that are compared where none is given; `precision=fp16,fp64` asks for others."""
TRIED = 4
"""Meshes of a scheme that are simulated: those with the least memory by bounds."""
OWN = ("mode", "engine", "precision", "out")


@dataclass(frozen=True)
class Cell:
    """The memory of the fullest device, in bytes, on the mesh that needs the least; `exact` is False for a bound, of a
    scheme whose planner plans nothing that does not fit. No engine trains what is `simulated_only`."""

    bytes: int
    limit_bytes: int
    mesh: str
    simulated_only: bool
    exact: bool = True

    def __str__(self) -> str:
        """23.5 GiB   37 %  1x8x1"""
        least, mark = "" if self.exact else "> ", f" {UNTRAINED}" if self.simulated_only else ""
        return f"{least}{size(self.bytes)} {percent(1 - self.bytes / self.limit_bytes):>6}  {self.mesh}{mark}"


Cells = dict[tuple[str, str], Cell]
"""By kind of scheme, and what is recomputed."""


def main(overrides: Sequence[str], console: Console | None = None) -> int:
    """Print the table; returns 0 if anything fits, else 2; 130 if a signal has ended it, with what is known by then.

    Raises CannotRun for what cannot be read, or where no scheme is possible.
    """
    console = console or console_of_sweep()
    names = engines.listed(overrides) or engines.compared()
    refuse([problem for name in names for problem in one_of("engine", name, engines.known())], FIT)
    table, ended = _Table(), ""
    with tempfile.TemporaryDirectory() as folder, Progress(console) as progress:
        try:
            with preemptible():
                table.fill(overrides, names, Path(folder), progress)
        except KeyboardInterrupt as error:
            ended = str(error) or "interrupted"
    if not any(table.cells.values()) and not ended:
        raise CannotRun([*{one.statement: one for one in table.problems}.values()], FIT)
    for line in table.lines(console):
        console.print(Text(line), soft_wrap=True)
    if ended:
        console.print(Text(f"{ended}: what is not there was not computed"), soft_wrap=True)
        return EXIT_CODES["preempted"]
    return 0 if table.fits else 2


@dataclass
class _Table:
    """What is known: the cells of each precision, and what is not possible, with the places for which that is so."""

    cells: dict[str, Cells] = field(default_factory=dict)
    refused: dict[str, list[str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def fill(self, overrides: Sequence[str], names: Sequence[str], folder: Path, progress: Progress) -> None:
        """Compute one engine after the other, in each precision."""
        for precision in _precisions(overrides):
            cells = self.cells.setdefault(precision, {})
            for engine in names:
                try:
                    own, lacking = _of_engine(_typed(overrides, engine, precision), folder, progress)
                    cells |= own
                    for kind, problem in lacking.items():
                        self._refuse(problem, f"{kind} precision={precision}")
                except CannotRun as error:
                    self.problems += error.problems[1:]
                    self._refuse(error.problems[0], f"{engine} precision={precision}")
                except WorkerFailed as error:
                    raise CannotRun([Problem("model", None, f"cannot be counted: {error}")], FIT) from error

    def _refuse(self, problem: Problem, place: str) -> None:
        self.problems.append(problem)
        self.refused.setdefault(problem.statement, []).append(place)

    @property
    def fits(self) -> bool:
        return any(one.bytes <= one.limit_bytes for cells in self.cells.values() for one in cells.values())

    def lines(self, console: Console) -> Iterator[str]:
        """Print the table, if there is any; yields what it means, and what is not possible."""
        if any(self.cells.values()):
            yield from _drawn(self.cells, console)
        for reason, where in self.refused.items():
            yield f"not possible: {', '.join(where)}: {reason}"


def _precisions(overrides: Sequence[str]) -> list[str]:
    given = [text.partition("=")[2] for text in overrides if bare_key(text) == "precision"]
    return given[-1].strip("[]").split(",") if given else list(PRECISIONS)


def _typed(overrides: Sequence[str], engine: str, precision: str) -> list[str]:
    """The overrides of a search whose memory is asked for. Layers are counted, never measured."""
    own = [text for text in overrides if bare_key(text) not in OWN]
    here = not any(text.startswith("cluster=") and text != "cluster=local" for text in own)
    counted = ["costs=analytic"] if here and not any(bare_key(text) in ("costs", "profile") for text in own) else []
    return ["mode=tune", *own, *counted, f"engine={engine}", f"precision={precision}"]


def _of_engine(overrides: Sequence[str], folder: Path, progress: Progress) -> tuple[Cells, dict[str, Problem]]:
    """The cells of an engine in one precision; a problem of each kind of scheme that has none."""
    with blocked():  # an exception in the midst of Hydra's own would be lost
        config = compose(overrides)
    files.write_text(folder / CONFIG, OmegaConf.to_yaml(config, resolve=True))  # for the process that counts layers
    tuner = Tuner(config, overrides, folder, progress)
    progress.phase("fitting", tuner.title + f" {overrides[-1]}")
    tuner.gather()
    tuner.measure(most=1, refusing=False)
    found: Cells = {}
    lacking: dict[str, Problem] = {}
    for scheme in tuner.schemes:
        heads = []
        for mesh in tuner.meshes(Block(scheme, tuner.blocks[0].devices)):
            one = next((one for one in tuner.of_mesh(scheme, mesh) if one.micro_batch in tuner.grounds), None)
            if one and not one.uneven():
                heads.append(tuner.with_state(Line(one)))
        heads.sort(key=lambda line: line.closed_form_memory_bytes or 0)
        for line in heads[:TRIED]:
            cell, place = _cell(tuner, line), (scheme.kind, scheme.recomputation)
            if isinstance(cell, Problem):
                lacking.setdefault(scheme.kind, cell)
            elif place not in found or _order(cell) < _order(found[place]):
                found[place] = cell
    there = {kind for kind, _ in found}
    return found, {kind: problem for kind, problem in lacking.items() if kind not in there}


def _order(cell: Cell) -> tuple[bool, int]:
    return not cell.exact, cell.bytes


def _cell(tuner: Tuner, line: Line) -> Cell | Problem:
    """The memory of a candidate, or why it has no plan whatever the memory is."""
    one, there = line.candidate, line.memory_limit_bytes or 0
    if found := tuner.against(one):
        return found[0]
    untrained = is_simulated_only(tuner.scheme_of(one), one)
    try:
        layout = tuner.layout(one)
        draft = extrapolate.simulated(tuner.config_of(one), tuner.scheme_of(one).engine, layout)
    except NoPlan as error:
        least = Cell(line.closed_form_memory_bytes or 0, there, mesh_text(one.mesh), untrained, exact=False)
        return least if line.full else error.unsolved
    except CannotRun as error:
        return error.problems[0]
    return Cell(max(draft.plan.predicted["peak_memory_bytes"]), there, mesh_text(draft.plan.used), untrained)


def _drawn(found: dict[str, Cells], console: Console) -> Iterator[str]:
    """Print the table; yields what it means."""
    places = list(dict.fromkeys(place for cells in found.values() for place in cells))
    columns = [
        Column("scheme", [kind for kind, _ in places]),
        Column("recom-\nputation", [recomputed for _, recomputed in places]),
        *(
            Column(f"{precision}: memory,\nheadroom, mesh", [str(cells.get(place, UNKNOWN)) for place in places],
                   figure=True)
            for precision, cells in found.items()
        ),
    ]  # fmt: skip
    table, _ = drawn(columns, console.width)
    console.print(table)
    limit = max(one.limit_bytes for cells in found.values() for one in cells.values())
    yield (
        f"simulated memory of the fullest device, of {size(limit)}; headroom: what is left, below 0 it does not fit; "
        f"{MESH_LEGEND}, the one that needs the least"
    )
    if any(one.simulated_only for cells in found.values() for one in cells.values()):
        yield UNTRAINED_LEGEND
