"""Committed faults: each must make a named test fail. `make mutants` (or `python -m tests.mutants [name ...]`).

A fault is a replacement of text in one file, applied to a copy of the tree. A fault that no longer applies, or that
its test survives, is an error.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutant_list import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("docs", "engines", "harness", "models", "planners", "tests", "conf", "sweeps", "pyproject.toml", "run.py")


def survives(mutant: Mutant) -> str | None:
    """None if the named test fails under the fault for a good reason, otherwise what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, folder)
        path = Path(folder) / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            return f"{mutant.file} holds the text to replace {text.count(mutant.old)} times"
        path.write_text(text.replace(mutant.old, mutant.new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=30", mutant.test]
        command += ["-k", mutant.only] if mutant.only else []
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 1:
        return None
    return "its test passes" if done.returncode == 0 else f"pytest ended with {done.returncode}:\n{done.stdout[-800:]}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m tests.mutants", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a mutant; by default all")
    names = parser.parse_args(arguments).names
    chosen = [m for m in MUTANTS if not names or m.name in names]
    alive = 0
    for mutant in chosen:
        wrong = survives(mutant)
        print(f"{'killed' if wrong is None else 'ALIVE '}  {mutant.name:<50} {mutant.test} {mutant.only}", flush=True)
        if wrong is not None:
            alive += 1
            print(f"        {wrong}")
    print(f"{len(chosen) - alive} of {len(chosen)} mutants killed")
    return 1 if alive or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
