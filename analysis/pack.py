"""`python -m analysis.pack [SWEEP...]`: archive the records of sweeps in analysis/results/records, small, to commit.

The file is SWEEP.jsonl.gz, or SWEEP-SCALE.jsonl.gz (`analysis.record_archive`). A point that the archive has and the
sweep's folder has not is kept. SWEEP is a folder, or the name of one in runs/; a name without a scale means all scales.
By default all sweeps of sweeps/ that are in runs/ are archived.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis import records
from analysis.record_archive import SUFFIX, Document, as_bytes, document
from analysis.records import sweep_command
from harness.config.registry import ROOT
from harness.core import files
from harness.core.problem import CannotRun, Problem, refuse

ARCHIVES = ROOT / "analysis" / "results" / "records"
RUNS = Path("runs")


def main(arguments: Sequence[str]) -> int:
    """Returns 2 for sweeps of which there are no records, else 0."""
    parser = argparse.ArgumentParser("python -m analysis.pack", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("sweeps", nargs="*", metavar="SWEEP", help=f"a folder, or a name in {RUNS}; by default all")
    try:
        folders = _folders(parser.parse_args(arguments).sweeps)
        for folder in folders:
            path, count = write(folder)
            print(f"written to {path}   {count} records, {path.stat().st_size / 1024:.1f} KiB")
    except CannotRun as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def archives_of_sweeps(names: Sequence[str]) -> list[Path]:
    """The archives of sweeps that exist, by the names of their folders."""
    return [path for name in names if (path := ARCHIVES / f"{name}{SUFFIX}").is_file()]


def write(folder: Path, archives: Path = ARCHIVES) -> tuple[Path, int]:
    """Archive the records of a sweep's folder; returns the file and how many records it has.

    Raises CannotRun where none can be read.
    """
    folder = folder.resolve()  # which has a name, other than "."
    path = archives / f"{folder.name}{SUFFIX}"
    loaded = records.load([folder, *([path] if path.is_file() else [])])
    for one in loaded.skipped:
        print(f"skipped {one.place}   {one.why}", file=sys.stderr)
    if not loaded.records:
        raise CannotRun([Problem(str(folder), None, "has no record that can be read")], "analysis.pack")
    newest = records.newest(loaded.records, records.point_of).values()
    documents = sorted((_anonymous(document(record), folder) for record in newest), key=_order)
    files.write_bytes(path, as_bytes(documents))
    return path, len(documents)


def _folders(names: Sequence[str]) -> list[Path]:
    """Raises CannotRun for all names without records, at once."""
    in_runs = sorted(folder for folder in RUNS.glob("*") if records.in_folder(folder))
    if not names:
        return [folder for folder in in_runs if sweep_command(folder.name)]
    folders = {name: [folder for folder in in_runs if _is_called(folder, name)] or _at(name) for name in names}
    message = f"is no folder with records, and no name of one in {RUNS}"
    missing = {name: sweep_command(Path(name).name) for name in names if not folders[name]}
    refuse([Problem(name, None, message, hint=command) for name, command in missing.items()], "analysis.pack")
    return list(dict.fromkeys(folder for of_name in folders.values() for folder in of_name))


def _is_called(folder: Path, name: str) -> bool:
    """Whether it is the name of the folder, or of its sweep."""
    return folder.name == name or (folder.name.partition("-")[0] == name and sweep_command(folder.name) != "")


def _at(name: str) -> list[Path]:
    return [Path(name)] if records.in_folder(Path(name)) else []


def _order(document: Document) -> tuple[str, list[str]]:
    """Records of one status are placed together: similar lines that are close to each other compress better."""
    return document["status"], sorted(document["manifest"]["overrides"])


def _anonymous(document: Document, folder: Path) -> Document:
    """Remove the names of this machine and of its folders."""
    names = {str(folder.resolve()): f"{RUNS}/{folder.name}", f"{ROOT}/": "", str(Path.home()): "~"}
    anonymous: Document = _replaced(document, names)
    if "host" in anonymous["manifest"].get("machine", {}):
        anonymous["manifest"]["machine"]["host"] = "host"
    return anonymous


def _replaced(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, names) for item in value]
    if isinstance(value, str):
        for place, name in names.items():
            value = value.replace(place, name)
        return Path(value).name if value.startswith("/") else value
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
