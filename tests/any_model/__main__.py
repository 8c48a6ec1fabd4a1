"""What the losses of models of any origin are in every engine: `make matrix` writes docs/any_model.md.

    case x column  ->  run.py of two devices  ->  losses of three steps  =  those of a plain loop    ok
                                              ->  refused before it starts                          a note

With names of models, their cells alone, and no page. Any other end is broken, an error of the project.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.core import files
from harness.core.model_profile import ModelProfile
from harness.core.run_files import METRICS, PROFILE
from tests import matrix
from tests.any_model.cases import CASES, TOLERANCE, Case, Column, cells
from tests.any_model.page import Cell, Model, page
from tests.matrix import End

PAGE = matrix.ROOT / "docs" / "any_model.md"


def cell(case: Case, column: Column, ended: End, folder: Path) -> Cell:
    """The cell of a run that has ended: its losses against those of the plain loop."""
    if ended.status != "ok":
        return Cell(ended)
    lines = (folder / METRICS).read_text(encoding="utf-8").splitlines()
    from tests.any_model import reference  # with torch, which --help does not need

    expected = reference.losses(case, column.precision)
    found = [json.loads(line)["loss"] for line in lines[: len(expected)]]
    difference = max(abs(mine - theirs) / abs(theirs) for mine, theirs in zip(found, expected, strict=True))
    if difference <= TOLERANCE[column.precision]:
        return Cell(ended, difference)
    return Cell(End("error", f"losses {found} instead of {expected}"), difference)


def model(case: Case, folder: Path) -> Model:
    """How the layers of a case suit a pipeline, by the profile of its first run."""
    profile = next(folder.glob(f"{case.name} */{PROFILE}"), None)
    costs = [layer.flops for layer in ModelProfile.load(profile).layers] if profile else []
    from tests.any_model import chain

    return Model(chain.of(case), chain.imbalance(costs) if costs else None)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m tests.any_model", description=(__doc__ or "").split("\n")[0])
    names = [case.name for case in CASES]
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"by default all: {', '.join(names)}")
    chosen = parser.parse_args(arguments).models
    if unknown := sorted(set(chosen) - set(names)):
        parser.error(f"no model is called {', '.join(unknown)}: there are {', '.join(names)}")
    jobs = [(case, column) for case, column in cells() if not chosen or case.name in chosen]
    with tempfile.TemporaryDirectory() as folder:
        found = run_all(jobs, Path(folder))
        of = {case: model(case, Path(folder)) for case in dict.fromkeys(case for case, _ in jobs)}
    text = page(found, of)
    if chosen:
        print(text)
    else:
        files.write_text(PAGE, text)
    broken = [cell for cell in found.values() if cell.end.broken]
    print(f"{len(found)} cells, {len(broken)} broken" + ("" if chosen else f"; written to {PAGE}"))
    return 1 if broken else 0


def run_all(jobs: Sequence[tuple[Case, Column]], folder: Path) -> dict[tuple[Case, Column], Cell]:
    """Run cells, two at a time, each in a folder of `folder` with its name; prints each."""
    found: dict[tuple[Case, Column], Cell] = {}
    folders = [folder / f"{case.name} {column.name}" for case, column in jobs]
    with ThreadPoolExecutor(matrix.WORKERS) as workers:
        ends = workers.map(matrix.run_in, folders, [column.overrides(case) for case, column in jobs])
        for (case, column), ended, own in zip(jobs, ends, folders, strict=True):
            found[case, column] = one = cell(case, column, ended, own)
            print(f"{len(found)}/{len(jobs)} {case.name} {column.name} -> {one.end.status} {one.text}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
