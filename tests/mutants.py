"""Committed faults: each must make a named test fail. `make mutants` (or `python -m tests.mutants [name ...]`).

A fault is a replacement of text in one file, applied to a copy of the tree. Its test runs in the fast tier first
(`make test`), and, if that does not notice, in the full one (`make test-full`). It is an error if a fault no longer
applies, if its test passes in both tiers, and if the fast tier notices less than half of all faults.
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
COPIED = (
    "analysis",
    "docs",
    "engines",
    "harness",
    "models",
    "planners",
    "tests",
    "conf",
    "sweeps",
    "pyproject.toml",
    "run.py",
)


TIERS = {
    "fast": ["-m", "not soak and not full", "--hypothesis-profile=fast"],
    "full": ["-m", "not soak", "--hypothesis-profile=full"],
}
FAILED, NONE_SELECTED = 1, 5
"""Exit codes of pytest."""


class NotKilled(Exception):
    """A fault does not apply, or the test named for it passes; carries why."""


def killed_by(mutant: Mutant) -> str:
    """Returns the first tier whose test fails under the fault; raises `NotKilled`."""
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, folder)
        _break(Path(folder) / mutant.file, mutant)
        for tier in TIERS:
            code, output = _test(mutant, tier, folder)
            if code == FAILED:
                return tier
            if code not in (0, NONE_SELECTED):
                raise NotKilled(f"pytest ended with {code}:\n{output[-800:]}")
    raise NotKilled("its test passes" if code == 0 else "there is no such test")


def _break(path: Path, mutant: Mutant) -> None:
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise NotKilled(f"{mutant.file} holds the text to replace {text.count(mutant.old)} times")
    path.write_text(text.replace(mutant.old, mutant.new))


def _test(mutant: Mutant, tier: str, folder: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=30", *TIERS[tier]]
    command += [mutant.test, *(["-k", mutant.only] if mutant.only else [])]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m tests.mutants", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a mutant; by default all")
    names = parser.parse_args(arguments).names
    chosen = [m for m in MUTANTS if not names or m.name in names]
    killed = dict.fromkeys(TIERS, 0)
    for mutant in chosen:
        try:
            tier = killed_by(mutant)
        except NotKilled as error:
            print(f"ALIVE         {mutant.name:<50} {mutant.test} {mutant.only}\n        {error}", flush=True)
        else:
            killed[tier] += 1
            print(f"killed  {tier}  {mutant.name:<50} {mutant.test} {mutant.only}", flush=True)
    dead = sum(killed.values())
    print(f"{dead} of {len(chosen)} mutants killed, {killed['fast']} of them by the fast tier")
    return 0 if chosen and dead == len(chosen) and 2 * killed["fast"] >= dead else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
