"""`mode=calibrate`: the links of this machine, from real collectives among its devices. Free of torch.

    cluster=local -> a child times collectives (timing.py) -> timings.json
                  -> least squares (harness.sbp.fit) -> calibration.json, calibration.png, cluster/calibrated.yaml

No engine, planner or model has a say in it.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from harness import children, clusters, devices, files, machine
from harness.calibration import cluster_file, picture, table
from harness.calibration.result import Calibration, Timings
from harness.cluster import Cluster
from harness.problem import CannotRun, Problem
from harness.progress import Progress

TITLE = "mode=calibrate"
TIMINGS, CALIBRATION, PICTURE = "timings.json", "calibration.json", "calibration.png"
OWN = (TIMINGS, CALIBRATION, PICTURE)
"""Files of a run. The cluster file is the user's; a calibration that begins in its folder removes it."""
MEASURED = ("bandwidth_gb_s", "alpha_s")
"""The keys of a cluster that a calibration finds."""


def calibrate(config: DictConfig, folder: Path, progress: Progress) -> Calibration:
    """Measure, fit, and leave the three files in the run's folder.

    Raises `CannotRun` where there is nothing to calibrate, `ChildFailed` for whatever happens to the ranks, ValueError
    where the timings tell no bandwidth.
    """
    count = ready(config).devices
    (folder / cluster_file.FILE).unlink(missing_ok=True)  # not yet where nothing can be calibrated
    known = machine.stored(config.cluster.device, config.remeasure)
    if known is None:
        progress.phase("measuring this machine", "once: peaks, memory, links")
        known = children.measured_machine(folder, TITLE, config.launch.timeout_s, config.cluster.device)
    progress.phase("timing collectives", f"among up to {count} ranks, {config.warmup} + {config.steps} rounds")
    children.work(folder, TITLE, config.launch.timeout_s, "calibrate", str(count))
    found = Calibration.of(Timings.load(folder / TIMINGS))
    found.save(folder / CALIBRATION)
    (folder / TIMINGS).unlink()
    cluster = clusters.build(clusters.of(config.cluster), known)
    files.write_text(folder / cluster_file.FILE, cluster_file.text(found, cluster, config, folder))
    picture.draw(found, folder / PICTURE, f"{cluster.device.name}, {found.backend}, {found.rounds} rounds")
    return found


def tell(found: Calibration, folder: Path, progress: Progress) -> None:
    """What the run ends with: measured against fitted, the files, and the command that uses them."""
    for part in (table.timed(found), "", table.fitted(found), ""):
        progress.console.print(part)
    for what, name in (("timings", CALIBRATION), ("picture", PICTURE), ("cluster", cluster_file.FILE)):
        progress.note(f"{what}  {folder / name}")
    progress.note(f"use it: {cluster_file.command(folder)}")


def ready(config: DictConfig) -> Cluster:
    """The cluster to calibrate: the devices of this machine. Raises `CannotRun` with all that speaks against it."""
    given = config.cluster
    if given.name != "local":
        what = "is only described, collectives are timed on the devices at hand"
        raise CannotRun([Problem(f"cluster {given.name}", what, "cluster=local")], TITLE)
    wrong = [
        Problem(f"cluster.{key} {given[key]}", "is what mode=calibrate finds out", f"leave cluster.{key} out")
        for key in MEASURED
        if given[key] is not None
    ]
    try:
        cluster = clusters.build(clusters.of(given))
    except CannotRun as error:
        raise CannotRun([*error.problems, *wrong], TITLE) from error
    if cluster.devices < 2:
        wrong.append(_alone(config))
    if wrong:
        raise CannotRun(wrong, TITLE)
    return cluster


def _alone(config: DictConfig) -> Problem:
    found = devices.detect(config.cluster.device)
    one_gpu = found.kind == "cuda" and found.count < 2
    mend = f"{'cluster.device=cpu ' * one_gpu}cluster.devices=2"
    here = f"{found.count} {'GPU' if found.kind == 'cuda' else 'core'}{'s' * (found.count != 1)} found"
    what = f"needs at least 2 devices for collectives, has 1 ({here})"
    return Problem(f"cluster.devices {'null' if config.cluster.devices is None else 1}", what, mend)
