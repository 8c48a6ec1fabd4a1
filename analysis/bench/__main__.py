"""`make bench`: run all benchmarks, or those that are named; prints tables, writes analysis/results/bench.json."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from analysis.bench import results
from harness import display, launch, malloc
from harness.cluster import Cluster, Link
from harness.manifest import manifest
from harness.memory import MemoryModel
from harness.plan import Plan
from harness.profile import LayerProfile, ModelProfile
from harness.schedule import Schedule
from harness.schedule.gpipe import gpipe
from harness.schedule.hops import plan_hops
from harness.schedule.one_f_one_b import one_f_one_b
from harness.simulate import simulate

PICTURE = results.ROOT / "docs" / "race.png"
ROUNDS = 9


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
    return [
        {"contestant": " ".join(command[1:5]), "step": statistics.median(warm), "quartiles": [min(warm), max(warm)]}
    ]


def simulator(rounds: int) -> list[dict[str, Any]]:
    """48 stages, 1,024 micro-batches: a schedule is made and simulated in one process; messages are ops, too."""
    profile = ModelProfile((LayerProfile("layer", 1e-3, 2e-3, output_bytes=10**6, saved_bytes=10**6),) * 48)
    plan = Plan.contiguous([1] * 48, 1024)
    hops = plan_hops(plan, profile, portals=True)
    cluster = Cluster(devices_per_node=48, intra=Link(1e-6, 1 / 12e9))
    makers: dict[str, Callable[[], Schedule]] = {
        "gpipe": lambda: gpipe(1024, range(48), hops, "never"),
        "one_f_one_b": lambda: one_f_one_b(1024, range(48), hops),
    }
    rows = []
    for name, make in makers.items():
        taken = []
        for _ in range(rounds // 2 + 1):
            start = time.perf_counter()
            schedule = make()
            simulate(schedule, plan, profile, cluster, MemoryModel())
            taken.append(time.perf_counter() - start)
        median, ops = statistics.median(taken), sum(len(lane.ops) for lane in schedule.lanes)
        rows.append({"contestant": name, "step": median, "quartiles": [min(taken), max(taken)], "ops": ops,
                     "ops a second": round(ops / median)})  # fmt: skip
    return rows


def main(names: list[str]) -> int:
    malloc.tune()
    os.environ |= launch.FORKABLE
    from analysis.bench import engines, messages, pipeline, tensor
    from analysis.bench.prediction import prediction
    from analysis.plots import race, style

    benches = {
        "two_devices": pipeline.two_devices,
        "one_device": pipeline.one_device,
        "checkpointing": pipeline.checkpointing,
        "components": pipeline.components,
        "planning": planning,
        "prediction": prediction,
        "simulator": simulator,
        "sbp": tensor.sbp,
        "messages": messages.messages,
        "race": engines.all_engines,
    }
    unknown = sorted(set(names) - set(benches))
    if unknown:
        print(f"no benchmark is called {', '.join(unknown)}: there are {', '.join(benches)}", file=sys.stderr)
        return 2
    found = results.load()
    for name in names or benches:
        rows = benches[name](int(os.environ.get("ROUNDS", ROUNDS)))
        show(name, (benches[name].__doc__ or "").strip().splitlines()[0], rows)
        found[name] = {"rows": rows, "manifest": manifest([], ["cpu"], {}, 1)}
        results.save(found)
        if name == "race" and (picture := race.figure(rows)):
            style.write(picture, PICTURE)
    return 0


def show(name: str, title: str, rows: list[dict[str, Any]]) -> None:
    """One table: the columns are all keys of its rows."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(title=f"{name}: {title}", title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == "contestant" else "right")
    for row in rows:
        table.add_row(*(cell(column, row.get(column)) for column in columns))
    Console(width=max(120, Console().width)).print(table)


def cell(column: str, value: Any) -> str:
    if value is None:
        return ""
    if column in ("step", "predicted"):
        return display.seconds(value)
    if column == "quartiles":
        return " - ".join(map(display.seconds, value))
    if column in ("peak memory", "bytes sent"):
        return display.size(value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
