"""`make replay`: the durations of a measured trace, put through the simulator, must give the measured step.

It separates wrong costs from wrong schedules: if a replay is off, the simulator executes another schedule than the
engine, or the engine does something between its ops that no op accounts for.

    python -m analysis.replay               runs gpipe and single a few times, and replays each run
    python -m analysis.replay RUN_DIR ...   replays runs that are there
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from harness import memory, registry
from harness.cluster import Cluster
from harness.plan import Plan
from harness.profile import ModelProfile
from harness.schedule import Schedule
from harness.simulate import simulate
from harness.trace import Trace

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 0.03
RUNS = (
    ("engine=single", "engine.checkpoint=never"),
    ("engine=single", "engine.checkpoint=except_last"),
    ("engine=gpipe", "engine.checkpoint=never"),
    ("engine=gpipe", "engine.checkpoint=except_last"),
    ("engine=gpipe", "engine.checkpoint=always"),
    ("engine=gpipe", "engine.dependency=false"),
    ("engine=gpipe", "engine.streams=false", "engine.portals=false"),
    ("engine=gpipe", "mesh.pipeline=1"),
)


def ratios(trace: Trace, schedule: Schedule, plan: Plan, profile: ModelProfile) -> list[float]:
    """Replayed / measured time of each step of a trace."""
    found = []
    for number, (start_s, end_s) in enumerate(trace.steps):
        durations = {span.op: span.end_s - span.start_s for span in trace.only(number).spans}
        done = simulate(schedule, plan, profile, Cluster(), memory.named("sgd_fp32"), durations=durations)
        found.append(done.figures["step_time_s"] / (end_s - start_s))
    return found


def of_run(folder: Path) -> list[float]:
    """The ratios of the steps of a measured run in its folder. Raises FileNotFoundError where it left no trace."""
    config = OmegaConf.load(folder / "config.yaml")
    assert isinstance(config, DictConfig)
    plan, profile = Plan.load(folder / "plan.json"), ModelProfile.load(folder / "profile.json")
    schedule = registry.build("engine", config.engine).schedule(plan, profile)
    return ratios(Trace.load(folder / "trace.json.gz"), schedule, plan, profile)


def table(rows: Sequence[tuple[str, list[float]]]) -> Table:
    shown = Table(box=None, pad_edge=False)
    shown.add_column("run")
    for title in ("steps", "replayed / measured", "smallest", "largest", ""):
        shown.add_column(title, justify="right")
    for name, found in rows:
        median = statistics.median(found)
        verdict = "ok" if abs(median - 1) <= TOLERANCE else f"off by more than {TOLERANCE:.0%}"
        shown.add_row(name, str(len(found)), f"{median:.4f}", f"{min(found):.4f}", f"{max(found):.4f}", verdict)
    return shown


def run(overrides: Sequence[str], folder: Path) -> None:
    """A short measured run, in a process of its own."""
    command = [sys.executable, "run.py", *overrides, "tracker=none", "steps=20", "warmup=3", f"out={folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[1:])} failed:\n{done.stdout}{done.stderr}")


def main(folders: list[str]) -> int:
    """Returns 1 if a replay is off."""
    if folders:
        rows = [(folder, of_run(Path(folder))) for folder in folders]
    else:
        rows = []
        with tempfile.TemporaryDirectory() as place:
            for number, overrides in enumerate(RUNS):
                run(overrides, Path(place) / str(number))
                rows.append((" ".join(overrides), of_run(Path(place) / str(number))))
    Console(width=120).print(table(rows))
    return 0 if all(abs(statistics.median(found) - 1) <= TOLERANCE for _, found in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
