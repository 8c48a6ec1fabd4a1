"""How time and memory grow with the size of what is simulated, searched, planned or read."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from analysis.bench import results
from analysis.plots.style import COLOURS, legend, panels, styled, title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LIMIT_S = 300.0
"""A size that takes longer is the last one of its subject."""


class Subject(NamedTuple):
    """What the sizes are of, and a function of `analysis.bench.scale_work`."""

    of: str
    work: str
    sizes: tuple[int, ...]


SUBJECTS = {
    "simulator, 1F1B, 32 micro-batches": Subject("stages", "stages", (1, 4, 16, 64, 256, 1024, 4096)),
    "mode=simulate, 8 stages x replicas": Subject("devices", "simulation", (8, 64, 512, 4096)),
    "mode=tune engine=myelin": Subject("devices", "tuning", (8, 64, 512, 4096, 10_000)),
    "planner=madpipe, 8 devices": Subject("layers", "madpipe", (20, 50, 100, 200, 400)),
    "planner=autoddl, 8 devices": Subject("products", "autoddl", (10, 30, 100, 300, 1000)),
    "a sweep before its first point runs": Subject("points", "sweep", (100, 1000, 10_000)),
    "accuracy ledger and data frame": Subject("records", "records", (100, 1000, 10_000)),
}


def scale(rounds: int) -> list[dict[str, Any]]:
    """Each size once, in a process of its own. The exponent is that of the time between a size and the one before."""
    rows = []
    for name, subject in SUBJECTS.items():
        measured(subject.work, subject.sizes[0])  # which makes the profiles
        before: tuple[int, float] | None = None
        for size in subject.sizes:
            taken = measured(subject.work, size)
            row: dict[str, Any] = {"entry": name, "size": size, "of": subject.of}
            if taken is None:
                rows.append(row | {"ended": f"after {LIMIT_S:.0f} s"})
                break
            seconds, memory = taken
            exponent = math.log(seconds / before[1]) / math.log(size / before[0]) if before else None
            rows.append(
                row | {"step": seconds, "quartiles": [seconds, seconds], "peak memory": memory, "exponent": exponent}
            )
            before = size, seconds
    return rows


def measured(work: str, size: int) -> tuple[float, int] | None:
    """Seconds of a piece of work, and bytes of its largest process; None where it takes too long. Raises
    CalledProcessError where it fails."""
    command = [sys.executable, "-m", "analysis.bench.scale_work", work, str(size)]
    with subprocess.Popen(
        command, cwd=results.ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    found = json.loads(output.splitlines()[-1])
    return found["seconds"], found["bytes"]


@styled
def figure(rows: list[dict[str, Any]], manifest: Mapping[str, Any] | None = None) -> Figure | None:
    """Seconds, and memory of the largest process, against size, a line for each subject. None without a row that has
    ended."""
    ended = [row for row in rows if "step" in row]
    if not ended:
        return None
    of = {row["entry"]: f"{row['entry']}: {row['of']}" for row in ended}
    colours = dict(zip(of, COLOURS, strict=False))
    drawn, axes = panels(1, 2, 10.0, 4.0)
    for panel, key, unit, label in ((axes[0, 0], "step", 1, "seconds"), (axes[0, 1], "peak memory", 2**30, "GiB")):
        for name, colour in colours.items():
            own = [row for row in ended if row["entry"] == name]
            sizes, values = [row["size"] for row in own], [row[key] / unit for row in own]
            panel.plot(sizes, values, "o-", color=colour, markersize=4)
        panel.set(xscale="log", yscale="log", xlabel="size", ylabel=label)
    machine = f", {manifest['machine']['cpu']}" if manifest else ""
    title(drawn, f"Time of the work, and memory of its largest process, by size, measured{machine}")
    legend(drawn, {of[name]: colour for name, colour in colours.items()})
    return drawn
