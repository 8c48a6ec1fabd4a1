"""`python -m analysis.pack [SWEEP...]`: records of sweeps, each as a small file in analysis/results/records to commit.

The file is SWEEP.json, or SWEEP-SCALE.json (`analysis.packed`). A point that it has already, and the sweep's folder has
not, stays. SWEEP is a folder, or the name of one in runs/; a name stands for all its scales. Without any all sweeps of
sweeps/ that are in runs/ are packed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis import records, sweeps
from analysis.folded import Document
from analysis.packed import as_text, document
from harness import files
from harness.problem import CannotRun, Problem
from harness.registry import ROOT

PACKS = ROOT / "analysis" / "results" / "records"
RUNS = Path("runs")


def main(arguments: Sequence[str]) -> int:
    """Returns 2 for sweeps of which there are no records, else 0."""
    parser = argparse.ArgumentParser("python -m analysis.pack", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "sweeps", nargs="*", metavar="SWEEP", help=f"a folder, or a name in {RUNS}; by default all there"
    )
    try:
        folders = _folders(parser.parse_args(arguments).sweeps)
        for folder in folders:
            path, count = write(folder)
            print(f"written to {path}   {count} records, {path.stat().st_size / 1024:.1f} KiB")
    except CannotRun as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def of_sweeps(names: Sequence[str]) -> list[Path]:
    """The packs of sweeps, by the names of their folders, that are there."""
    return [path for name in names if (path := PACKS / f"{name}.json").is_file()]


def write(folder: Path, packs: Path = PACKS) -> tuple[Path, int]:
    """Pack the records of a sweep's folder; returns the file and how many it has."""
    path = packs / f"{folder.name}.json"
    loaded = records.load([folder, *([path] if path.is_file() else [])])
    for one in loaded.skipped:
        print(f"skipped {one.place}   {one.why}", file=sys.stderr)
    newest = records.newest(loaded.records, records.point_of).values()
    documents = [_neutral(document(record), folder) for record in newest]
    files.write_text(path, as_text(sorted(documents, key=_place)))
    return path, len(documents)


def _folders(names: Sequence[str]) -> list[Path]:
    """Raises CannotRun for all names without records, at once."""
    there = sorted(folder for folder in RUNS.glob("*") if records.in_folder(folder))
    if not names:
        return [folder for folder in there if sweeps.command(folder.name)]
    found = {name: [folder for folder in there if _is_called(folder, name)] or _at(name) for name in names}
    what = f"is no folder with records, and no name of one in {RUNS}"
    gone = [Problem(name, what, sweeps.command(Path(name).name)) for name in names if not found[name]]
    if gone:
        raise CannotRun(gone, "analysis.pack")
    return list(dict.fromkeys(folder for own in found.values() for folder in own))


def _is_called(folder: Path, name: str) -> bool:
    """By its own name, or by its sweep's."""
    return folder.name == name or (folder.name.partition("-")[0] == name and sweeps.command(folder.name) != "")


def _at(name: str) -> list[Path]:
    return [Path(name)] if records.in_folder(Path(name)) else []


def _place(document: Document) -> list[tuple[str, str]]:
    """What the records of a pack are ordered by."""
    return sorted((key, value or "") for key, value in document["manifest"]["overrides"].items())


def _neutral(document: Document, folder: Path) -> Document:
    """Without the names of this machine and of its folders."""
    places = {str(folder.resolve()): f"{RUNS}/{folder.name}", f"{ROOT}/": "", str(Path.home()): "~"}
    found: Document = _replaced(document, places)
    if "host" in found["manifest"].get("machine", {}):
        found["manifest"]["machine"]["host"] = "host"
    return found


def _replaced(value: Any, places: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(item, places) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, places) for item in value]
    if isinstance(value, str):
        for place, name in places.items():
            value = value.replace(place, name)
        return Path(value).name if value.startswith("/") else value
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
