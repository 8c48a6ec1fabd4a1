"""`python -m analysis.published [PAPER...]`: published against predicted, for every absolute figure of the papers.

The predictions are those of the committed records and of runs/, as for `python -m analysis.PAPER`. Of each paper it
prints all cells, then mean and spread of each table, and the worst cells with their reasons.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from analysis import cells, paper_cli
from analysis.cells import Group, Judged
from analysis.paper_pages import PAGES
from analysis.report import MISSING, Section

TITLE = "Published against predicted"
INTRO = "Every absolute figure of the papers' tables, and what the records predict for it at the paper's scale."
NEAR = 0.15
"""A table whose worst cell misses by more than this is shown with its reason."""
FACTORS = (1.1, 1.25, 2.0)
NO_REASON = "No reason is known."
MEANING = (
    "Ratio: predicted / published. Mean and spread are the geometric mean and the geometric standard deviation of a "
    "table's ratios. Cells that a constant was fitted on are marked, and left out of both.",
    "Savings are compared as what is left: 20 % saved is 80 % left. A speed-up over a table's own first row is left "
    "out for this row, which is 1 by definition.",
)
NOTHING = "It prints no absolute figure that is simulated: curves, and claims in words."


def main(arguments: Sequence[str]) -> int:
    """Returns 0; a prediction that misses is no error."""
    parser = argparse.ArgumentParser("python -m analysis.published", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("papers", nargs="*", choices=[*PAGES, []], metavar="PAPER", help=", ".join(PAGES))
    paper_cli.add_format(parser)
    options = parser.parse_args(arguments)
    found = {paper: _loaded(paper) for paper in options.papers or PAGES}
    sections = [*(of_paper(paper, own) for paper, own in found.items()), *summary(found)]
    paper_cli.output(TITLE, INTRO, sections, options.format)
    return 0


def judged(paper: str, results: Any) -> list[Judged]:
    """The cells of a paper with their notes; `results` are those of its page."""
    return list(cells.judged(PAGES[paper].cells(results), cells.notes(paper)))


def _loaded(paper: str) -> list[Judged]:
    """`judged`, from the committed records and those in runs/."""
    page = PAGES[paper]
    loaded = page.load()
    print("\n".join(f"{paper}: {line}" for line in loaded.messages()), file=sys.stderr)
    return judged(paper, page.results(loaded.records))


def of_paper(paper: str, own: Sequence[Judged]) -> Section:
    """All cells of a paper."""
    rows = tuple(
        (one.cell.table, one.cell.quantity, one.cell.row, *_figures(one), "fitted" if one.fitted else "") for one in own
    )
    constants: dict[str, list[str]] = {}
    for one in own:
        if one.fitted:
            constants.setdefault(one.fitted, []).append(f"{one.cell.table} {one.cell.quantity} {one.cell.row}".strip())
    fitted = (f"Fitted: {constant}, on {'; '.join(on)}." for constant, on in constants.items())
    columns = ("table", "quantity", "row", "published", "predicted", "ratio", "")
    return Section(f"{paper}: {len(own)} cells", columns, rows, tuple(fitted) if own else (NOTHING,), texts=3)


def summary(found: Mapping[str, Sequence[Judged]]) -> list[Section]:
    """Mean and spread of each table, then the worst cells of all papers."""
    of = {paper: cells.groups(own) for paper, own in found.items()}
    rows = tuple((paper, *_line(group)) for paper, own in of.items() for group in own)
    columns = ("paper", "table", "quantity", "cells", "fitted", "not run", "mean", "spread", "least", "most")
    every = [one for own in found.values() for one in own]
    notes = (*MEANING, _counted(every), *(f"{name}: {NOTHING}" for name in of if not of[name]))
    return [Section("Each table", columns, rows, notes, texts=3), *_worst(of)]


def _line(group: Group) -> tuple[str, ...]:
    ratios = group.ratios
    return (
        group.table,
        group.quantity,
        str(len(group.cells)),
        str(group.fitted or MISSING),
        str(group.not_predicted or MISSING),
        _number(cells.mean(ratios)),
        _number(cells.spread(ratios)),
        *(f"{end(ratios):.2f}" if ratios else MISSING for end in (min, max)),
    )


def _worst(of: Mapping[str, Sequence[Group]]) -> list[Section]:
    """The worst cell of each table that misses by more than `NEAR`, and why."""
    missing = [(paper, group.worst) for paper, own in of.items() for group in own if group.worst]
    rows: list[tuple[str, ...]] = []
    reasons: dict[str, list[str]] = {}
    for paper, one in sorted(missing, key=lambda named: -named[1].miss):
        if one.miss > 1 + NEAR:
            number, mark = str(len(rows) + 1), "fitted" if one.fitted else ""
            rows.append((number, paper, one.cell.table, one.cell.quantity, one.cell.row, *_figures(one), mark))
            reasons.setdefault(one.reason or NO_REASON, []).append(number)
    columns = ("", "paper", "table", "quantity", "row", "published", "predicted", "ratio", "")
    notes = tuple(f"{', '.join(numbers)}: {reason}" for reason, numbers in reasons.items())
    title = f"The worst cell of each table that misses by more than {100 * NEAR:g} %"
    return [Section(title, columns, tuple(rows), notes, texts=5)] if rows else []


def _figures(one: Judged) -> tuple[str, str, str]:
    """Published, predicted and their ratio."""
    return f"{one.cell.published:,.5g}", _number(one.cell.predicted, "{:,.5g}"), _number(one.ratio)


def near(every: Sequence[Judged]) -> dict[float, str]:
    """By factor, how many of the cells that count are within it: {1.1: "73 of 124", ...}."""
    misses = [one.miss for one in every if one.miss and not one.fitted]
    return {factor: f"{sum(miss <= factor for miss in misses)} of {len(misses)}" for factor in FACTORS}


def _counted(every: Sequence[Judged]) -> str:
    fitted, gone = sum(bool(one.fitted) for one in every), sum(one.ratio is None for one in every)
    shares = ", ".join(f"{share} within a factor {factor:g}" for factor, share in near(every).items())
    return f"{len(every)} cells: {fitted} fitted on, {gone} not run; of the others {shares}."


def _number(figure: float | None, form: str = "{:.2f}") -> str:
    return MISSING if figure is None else form.format(figure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
