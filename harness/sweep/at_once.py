"""Runs several points of a sweep at the same time, each in a process of its own, as many as there are cores.

    mode=tune engine=gpipe,myelin,deepspeed      core 0   |gpipe ......|deepspeed ............|
                                                 core 1   |myelin ..................|

Only searches that measure nothing: what is measured on this machine has it alone. The processes are forked from the
sweep's, which has composed their configurations and loaded what a search needs: that takes a second.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Mapping, Sequence
from concurrent import futures
from pathlib import Path

from omegaconf import DictConfig

from harness.config import cluster_config
from harness.core.problem import CannotRun
from harness.core.record import EXIT_CODES, RunRecord
from harness.core.run_files import CONSOLE
from harness.host import devices
from harness.launch import fork_server
from harness.launch.child_wait import LOOK_S
from harness.planning import profiles
from harness.run import runner
from harness.run.folder_lock import Busy
from harness.sweep import run_point
from harness.sweep.live_table import Display
from harness.sweep.row import Row

Elsewhere = tuple[Row, RunRecord | None]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Each process has a core."""
LAST_BYTES = 4096
"""Of the end of a log, which has its last line."""


def able(config: DictConfig | None) -> bool:
    """Whether a point is a search whose cluster and layer times are computed."""
    if config is None or config.mode != "tune" or config.cluster.name == "local":
        return False
    cluster = cluster_config.build(cluster_config.from_group(config.cluster))
    return profiles.origin(config, cluster) != "measured"


def run(
    rows: Sequence[Row], folder: Path, configs: Mapping[str, DictConfig | None], display: Display
) -> list[Elsewhere]:
    """Fill in the records of the rows; returns those that another sweep is running, each with the record that it had
    when that was seen.

    Raises KeyboardInterrupt, with the records filled in, if this process is asked to end.
    """
    stopped: list[KeyboardInterrupt] = []

    def waiting() -> None:
        if stopped:
            raise stopped[0]

    def one(row: Row) -> None:
        waiting()
        place = folder / row.point.id
        try:
            run_point.run_point(
                row, place, configs[row.point.id], waiting, here=False, environment=ONE_THREAD, server=server
            )
        except Busy:
            raise
        except Exception:
            stopped.append(KeyboardInterrupt("another point could not be run"))
            raise

    names = {name: str(made.engine.name) for name, made in configs.items() if made}
    with (
        fork_server.forked(functools.partial(_searched, configs, folder)) as server,
        futures.ThreadPoolExecutor(min(len(rows), devices.cores())) as pool,
    ):
        try:
            return _watched({pool.submit(one, row): row for row in rows}, folder, display, names)
        except KeyboardInterrupt as error:  # the others are asked to end, and leave their records
            stopped.append(error)
            raise


def _searched(configs: Mapping[str, DictConfig | None], folder: Path, words: Sequence[str]) -> int:
    """Run a point, in a process that was forked for it; returns its exit code."""
    point, *overrides = words
    config = configs[point]
    assert config is not None
    config.out = str(folder / point)
    sys.argv = run_point.command(overrides)  # which the record has
    try:
        return EXIT_CODES[runner.run(config, overrides).status]
    except CannotRun as error:
        print(error, file=sys.stderr)
        return EXIT_CODES["infeasible"]


def _watched(
    running: dict[futures.Future[None], Row], folder: Path, display: Display, names: Mapping[str, str]
) -> list[Elsewhere]:
    """Show what the points are doing, in turns, under the `names` of their engines, until all have ended."""
    left, elsewhere = set(running), list[Elsewhere]()
    for turn in itertools.count():
        ended, left = futures.wait(left, LOOK_S, futures.FIRST_COMPLETED)
        for future in sorted(ended, key=[*running].index):
            row = running[future]
            try:
                future.result()
                display.ended(row)
            except Busy:
                row.waits = "elsewhere"
                elsewhere.append((row, run_point.stored(folder / row.point.id)))
        if not left:
            return elsewhere
        busy = [row for future, row in running.items() if future in left and future.running()]
        if busy:
            row = busy[turn % len(busy)]
            display.doing(row, f"{names[row.point.id]}: {_last_line(folder / row.point.id / CONSOLE)}")
    raise AssertionError("a count has no end")


def _last_line(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LAST_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return "begins"
    return lines[-1] if lines else "begins"
