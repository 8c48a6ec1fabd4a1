"""`make bench`: run all benchmarks, or those that are named; prints tables, writes analysis/results/bench.json, and
adds to runs/bench.jsonl, which `python -m analysis.compare bench:1 bench:0` reads."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

from rich.console import Console
from rich.table import Table

from analysis.bench import history, results
from harness.core import units
from harness.host import malloc
from harness.launch import supervisor
from harness.run.manifest import manifest

DOCS = results.ROOT / "docs"
ROUNDS = 9
NAMES = (
    *("two_devices", "one_device", "checkpointing", "components"),
    *("planning", "prediction", "simulator", "tune", "sbp", "messages", "captured", "scale", "race"),
)
"""The benchmarks, in the order in which they run."""


def planning(rounds: int) -> list[dict[str, Any]]:
    """`mode=plan` as a user calls it, with a cached profile: the whole process, start-up included."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "run.py", "mode=plan", "engine=gpipe", "model=unet", f"out={folder}"]
        taken = []
        for _ in range(rounds // 2 + 1):
            start = time.perf_counter()
            subprocess.run(command, cwd=results.ROOT, check=True, capture_output=True)
            taken.append(time.perf_counter() - start)
    warm = taken[1:]
    return [{"entry": " ".join(command[1:5]), "step": statistics.median(warm), "quartiles": [min(warm), max(warm)]}]


def is_commit(name: str) -> bool:
    """Whether git knows a commit by this name."""
    asked = ["git", "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
    return subprocess.run(asked, cwd=results.ROOT, capture_output=True, check=False).returncode == 0


def _benches(commit: str | None) -> dict[str, Callable[[int], list[dict[str, Any]]]]:
    """The benchmarks by name, or that with an earlier commit. They import torch, which takes seconds and is not needed
    for --help."""
    if commit:
        from analysis.bench import before

        return {"before": update_wrapper(partial(before.compared, commit), before.compared)}
    from analysis.bench import captured, gpipe, myelin, race, sbp
    from analysis.bench.prediction import prediction
    from analysis.bench.scale import scale
    from analysis.bench.simulator import simulator
    from analysis.bench.tune import tune

    of_gpipe = (gpipe.two_devices, gpipe.one_device, gpipe.checkpointing, gpipe.components)
    others = (planning, prediction, simulator, tune, sbp.sbp, myelin.messages, captured.captured, scale, race.race)
    return dict(zip(NAMES, (*of_gpipe, *others), strict=True))


def main(arguments: list[str]) -> int:
    """Returns 0; an unknown name or commit ends the process with code 2, as a wrong argument does."""
    parser = argparse.ArgumentParser("python -m analysis.bench", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(NAMES)}; by default all")
    parser.add_argument(
        "--before", metavar="COMMIT", help="instead: engines of this checkout and of a commit, in turns"
    )
    asked = parser.parse_args(arguments)
    names = asked.names
    if asked.before and (names or not is_commit(asked.before)):
        parser.error(
            f"--before: {'names go without it' if names else f'{asked.before} is no commit, git log has them'}"
        )
    if unknown := sorted(set(names) - set(NAMES)):
        parser.error(f"no benchmark is called {', '.join(unknown)}: there are {', '.join(NAMES)}")
    malloc.tune()
    os.environ |= supervisor.FORKABLE
    from analysis.bench import race_plot
    from analysis.bench import scale as growth
    from analysis.plots import style

    benches = _benches(asked.before)
    all_results = results.load()
    for name in names or benches:
        rounds = int(os.environ.get("ROUNDS", ROUNDS))
        rows = benches[name](rounds)
        show(name, (benches[name].__doc__ or "").strip().splitlines()[0], rows)
        all_results[name] = {"rows": rows, "manifest": manifest([], ["cpu"], {}, 1)}
        results.save(all_results)
        history.append(name, rounds, rows, all_results[name]["manifest"])
        draw = {"race": race_plot.figure, "scale": growth.figure}.get(name)
        if draw and (picture := draw(rows, all_results[name]["manifest"])):
            style.write(picture, DOCS / f"{name}.png")
    return 0


def show(name: str, title: str, rows: list[dict[str, Any]]) -> None:
    """One table: the columns are all keys of its rows."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(title=f"{name}: {title}", title_justify="left")
    for column in columns:
        if column == "entry":
            table.add_column("entry", justify="left")
        else:
            table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(cell(column, row.get(column)) for column in columns))
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(table)


def cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if column in ("step", "predicted"):
        return units.seconds(value)
    if column == "interval":
        return " to ".join(f"{end:.3f}" for end in value)
    if column == "quartiles":
        return " - ".join(map(units.seconds, value))
    if column in ("peak memory", "bytes sent"):
        return units.size(value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
