"""`make replay`: the durations of a measured trace, put through the simulator, must give the measured step.

It separates wrong costs from wrong schedules: if a replay is off, the simulator executes another schedule than the
engine, or the engine does something between its ops that no op accounts for.

    python -m analysis.replay               runs gpipe and single a few times (about 2 minutes), and replays each run
    python -m analysis.replay RUN_DIR ...   replays measured runs that are there

Exit codes: 0, 1 if a replay is off by more than 3 %, 2 for a folder that holds no measured run.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from analysis.run_folders import RUN_FOLDER, NoRun
from harness.config import registry
from harness.core import memory_model
from harness.core.cluster import Cluster
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.core.problem import Problem
from harness.core.serialization import SchemaError
from harness.core.trace import Trace
from harness.run import stored_record
from harness.schedule import Schedule
from harness.simulator import simulate

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 0.03
SHORT = ("tracker=none", "steps=8", "warmup=2")
BATCH = ("batch.size=32", "batch.micro_batches=8")
"""Tasks long enough that Python's part between them weighs little."""
RUNS = (
    ("engine=single", "engine.checkpoint=never"),
    ("engine=single", "engine.checkpoint=except_last"),
    ("engine=gpipe", "engine.checkpoint=never"),
    ("engine=gpipe", "engine.checkpoint=except_last"),
    ("engine=gpipe", "engine.checkpoint=always"),
    # here CPU devices wait for the loss before they recompute, the schedule does not: 1 / micro-batches of a step
    ("engine=gpipe", "engine.dependency=false", "batch.micro_batches=16"),
    ("engine=gpipe", "engine.streams=false", "engine.portals=false"),
    ("engine=gpipe", "mesh.pipeline=1"),
)


def ratios(trace: Trace, schedule: Schedule, plan: Plan, profile: ModelProfile) -> list[float]:
    """Replayed / measured time of each step of a trace."""
    quotients = []
    for number, (start_s, end_s) in enumerate(trace.steps):
        durations = {span.op: span.end_s - span.start_s for span in trace.only(number).spans}
        done = simulate(schedule, plan, profile, Cluster(), memory_model.named("sgd_fp32"), durations=durations)
        quotients.append(done.figures["step_time_s"] / (end_s - start_s))
    return quotients


def step_ratios(folder: Path) -> list[float]:
    """Return predicted / measured of each step of a run in its folder. Raises `NoRun` if it has none."""
    try:
        record = stored_record.load(folder)
        if record.source != "measured" or record.trace is None:
            why = f"is of a run that left no measured trace ({record.source}, {record.status})"
            raise NoRun(Problem(str(folder), None, why, hint="one with mode=run that ended ok"))
        config = OmegaConf.load(folder / "config.yaml")
        plan, profile = Plan.load(folder / "plan.json"), ModelProfile.load(folder / "profile.json")
        trace = Trace.load(folder / record.trace)
    except SchemaError as error:
        raise NoRun(Problem(str(folder), None, f"cannot be read: {error}")) from error
    except OSError as error:
        why = f"holds no run: {error.filename}: {error.strerror}"
        raise NoRun(Problem(str(folder), None, why, hint=RUN_FOLDER)) from error
    assert isinstance(config, DictConfig)
    return ratios(trace, registry.build("engine", config.engine).schedule(plan, profile), plan, profile)


def table(rows: Sequence[tuple[str, list[float]]]) -> Table:
    shown = Table(box=None, pad_edge=False)
    shown.add_column("run")
    for title in ("steps", "replayed / measured", "smallest", "largest", ""):
        shown.add_column(title, justify="right")
    for name, ratios in rows:
        median = statistics.median(ratios)
        verdict = "ok" if abs(median - 1) <= TOLERANCE else f"off by more than {TOLERANCE:.0%}"
        shown.add_row(name, str(len(ratios)), f"{median:.4f}", f"{min(ratios):.4f}", f"{max(ratios):.4f}", verdict)
    return shown


def run(overrides: Sequence[str], folder: Path) -> None:
    """A short measured run, in a process of its own."""
    command = [sys.executable, "run.py", *SHORT, *BATCH, *overrides, f"out={folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[1:])} failed:\n{done.stdout}{done.stderr}")


def own_runs() -> list[tuple[str, list[float]]]:
    """`RUNS`, run and replayed."""
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for number, overrides in enumerate(RUNS):
            folder = Path(place) / str(number)
            print(f"[{number + 1}/{len(RUNS)}] {' '.join(overrides)}", file=sys.stderr)
            run(overrides, folder)
            rows.append((" ".join(overrides), step_ratios(folder)))
    return rows


def main(arguments: Sequence[str]) -> int:
    """Returns 1 if a replay is off, 2 for a folder that holds no measured run."""
    parser = argparse.ArgumentParser(
        "python -m analysis.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, metavar="RUN_DIR")
    folders = parser.parse_args(arguments).folders
    try:
        rows = [(str(folder), step_ratios(folder)) for folder in folders] or own_runs()
    except NoRun as error:
        print(error, file=sys.stderr)
        return 2
    Console(width=120).print(table(rows))
    return 0 if all(abs(statistics.median(ratios) - 1) <= TOLERANCE for _, ratios in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
