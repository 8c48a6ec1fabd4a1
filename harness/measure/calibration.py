"""`mode=calibrate`: fit this machine's links to timed collectives among its devices, and print the fit. Free of torch.

    cluster=local -> a worker times collectives (time_collectives.py) -> timings.json
                  -> least squares (harness.measure.alpha_beta_fit) -> calibration.json, calibration.png,
                  cluster/calibrated.yaml

It uses no engine, planner or model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from omegaconf import DictConfig
from rich.table import Table
from rich.text import Text

from harness.config import cluster_config
from harness.core import files
from harness.core.cluster import Cluster
from harness.core.problem import LEAVE_OUT, CannotRun, Fix, Problem, refuse
from harness.core.run_files import CALIBRATION, CALIBRATION_PLOT, TIMINGS
from harness.core.units import seconds, size
from harness.host import devices, machine
from harness.launch import supervisor
from harness.measure import calibrated_cluster, calibration_plot
from harness.measure.alpha_beta_fit import Fit, Timing, middle
from harness.measure.calibrated_cluster import speed
from harness.measure.calibration_result import Calibration, Timings
from harness.report.progress import Progress

TITLE = "mode=calibrate"
MEASURED = ("bandwidth_gb_s", "alpha_s")
"""The keys of a cluster that a calibration finds."""


def calibrate(config: DictConfig, count: int, folder: Path, progress: Progress) -> Calibration:
    """Measure the links of `count` devices, fit, and leave the three files in the run's folder.

    Raises `WorkerFailed` for whatever happens to the ranks, and ValueError where no bandwidth follows from the timings.
    """
    (folder / calibrated_cluster.FILE).unlink(missing_ok=True)
    known = machine.stored(config.cluster.device, config.remeasure, config.precision.tf32)
    if known is None or not known.knows_processes:
        progress.phase("measuring this machine", "once: peaks, memory, links")
        known = supervisor.measure_machine(
            folder,
            TITLE,
            config.launch.timeout_s,
            config.cluster.device,
            config.precision.tf32,
            "processes" if known else "all",
        )
    progress.phase("timing collectives", f"among up to {count} ranks, {config.warmup} + {config.steps} rounds")
    supervisor.run_worker(folder, TITLE, config.launch.timeout_s, "calibrate", str(count))
    found = Calibration.of(Timings.load(folder / TIMINGS))
    found.save(folder / CALIBRATION)
    (folder / TIMINGS).unlink()
    cluster = cluster_config.build(cluster_config.from_group(config.cluster), known)
    files.write_text(folder / calibrated_cluster.FILE, calibrated_cluster.text(found, cluster, config, folder))
    title = f"{cluster.device.name}, {found.backend}, {found.rounds} rounds"
    calibration_plot.draw(found, folder / CALIBRATION_PLOT, title)
    return found


def report(found: Calibration, folder: Path, progress: Progress) -> None:
    """Print measured against fitted times, the files, and the command that uses them."""
    for part in (timed(found), "", fitted(found), ""):
        progress.console.print(part)
    for what, name in (("timings", CALIBRATION), ("picture", CALIBRATION_PLOT), ("cluster", calibrated_cluster.FILE)):
        progress.note(f"{what}  {folder / name}")
    progress.note(f"use it: {calibrated_cluster.command(folder)}")


def ready(config: DictConfig) -> Cluster:
    """The cluster to calibrate: the devices of this machine. Raises `CannotRun` with every problem."""
    given = config.cluster
    if given.name != "local":
        message = "is only described, collectives are timed on the devices of this machine"
        raise CannotRun([Problem("cluster", given.name, message, ({"cluster": "local"},))], TITLE)
    keys = {f"cluster.{key}": given[key] for key in MEASURED if given[key] is not None}
    wrong = [Problem(key, value, "is what mode=calibrate measures", ({key: LEAVE_OUT},)) for key, value in keys.items()]
    try:
        cluster = cluster_config.build(cluster_config.from_group(given))
    except CannotRun as error:
        raise CannotRun([*error.problems, *wrong], TITLE) from error
    if cluster.devices < 2:
        wrong.append(_alone(config))
    refuse(wrong, TITLE)
    return cluster


def _alone(config: DictConfig) -> Problem:
    found = devices.detect(config.cluster.device)
    one_gpu = found.kind == "cuda" and found.count < 2
    fix: Fix = ({"cluster.device": "cpu"} if one_gpu else {}) | {"cluster.devices": 2}
    here = f"{found.count} {'GPU' if found.kind == 'cuda' else 'core'}{'s' * (found.count != 1)} found"
    message = f"needs at least 2 devices for collectives, has 1 ({here})"
    return Problem("cluster.devices", config.cluster.devices, message, (fix,))


TIMED = ("collective", "ranks", "bytes", "measured", "quartiles", "plain fit", "", "relative fit", "")
FITTED = ("least squares", "alpha", "1 / beta", "R^2", "R^2, large messages", "off, middle sizes")


def timed(found: Calibration) -> Table:
    """The smallest, a middle and the largest message of each collective and group, against both fits.

    After a fit's time comes its error.
    """
    table = _table(TIMED)
    for name in found.alone:
        for members in found.groups:
            group = sorted((t for t in found.timings if (t.name, t.members) == (name, members)), key=lambda t: t.bytes)
            for timing in dict.fromkeys((group[0], group[len(group) // 2], group[-1])):
                table.add_row(*map(Text, _timed_row(found, timing)))
    return table


def fitted(found: Calibration) -> Table:
    """Alpha, bandwidth and R^2: of both fits to all collectives, and of each collective fitted alone."""
    table = _table(FITTED)
    for fit in found.fits:
        table.add_row(*map(Text, _fitted_row(f"{fit.weights}, all together", fit, found.timings, found.large)))
    for name, fit in found.alone.items():
        own, large = ([t for t in timings if t.name == name] for timings in (found.timings, found.large))
        table.add_row(*map(Text, _fitted_row(f"plain, {name} alone", fit, own, large)))
    return table


def _timed_row(found: Calibration, timing: Timing) -> Iterator[str]:
    low, high = timing.spread_s or (timing.seconds, timing.seconds)
    yield from (timing.name, str(timing.members), size(timing.bytes), seconds(timing.seconds))
    yield f"{seconds(low)} to {seconds(high)}"
    for fit in found.fits:
        yield seconds(fit.seconds(timing))
        yield f"{fit.seconds(timing) / timing.seconds - 1:+.0%}"


def _fitted_row(what: str, fit: Fit, timings: Sequence[Timing], large: Sequence[Timing]) -> Iterator[str]:
    yield from (what, seconds(fit.alpha_s), speed(fit), f"{fit.r2:.3f}", f"{fit.r2_of(large):.3f}")
    yield f"{fit.factor(middle(timings)):.2f} times"


def _table(titles: Sequence[str]) -> Table:
    """Texts to the left, numbers to the right."""
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="left" if title == titles[0] else "right")
    return table
