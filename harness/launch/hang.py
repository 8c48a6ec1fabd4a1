"""What the processes of a run do when there is no progress, and which of them holds up the others.

    parent                                   each training process that can
    request: RUN_DIR/hang/, SIGUSR2  ----->  dump: RUN_DIR/hang/rank-3.json
    explain: stacks to the log, a reason

A process that is stopped (SIGSTOP), or never gives up Python's lock, writes nothing: then it is the one.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from harness.core.run_files import FLIGHT_RECORDER, HANG
from harness.core.serialization import Document, SchemaError
from harness.interfaces import Activity
from harness.launch.rank_names import RankNames

DUMP_S = 2.0
"""How long processes may take to write what they do."""
LOOK_S = 0.05
NAMED = 4
"""So many ranks are named one by one."""
WAITING = ("torch/distributed/", "multiprocessing/")
"""Modules in which a rank waits for others."""
AUTOGRAD = "torch/autograd/graph.py"
"""Where a backward pass calls C++, in which collectives may wait."""


@dataclass(frozen=True)
class Dump(Document):
    """What a process wrote about itself. `rank` None: it has forked ranks; `stopped` are those that do not run.

    `waiting`: 2 in a message or a collective, 1 perhaps, 0 in a layer or elsewhere.
    """

    rank: int | None
    where: str
    seconds: float
    waiting: int
    stacks: str
    ranks: tuple[int, ...] = ()
    stopped: tuple[int, ...] = ()


def dump(folder: Path, rank: int | None, activity: Activity, ranks: Mapping[int, int]) -> None:
    """Write what this process does; `ranks` are the process ids of those that it has forked."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    file = main.f_code.co_filename if main else ""
    waiting = 2 if activity.waits or any(part in file for part in WAITING) else int(AUTOGRAD in file)
    stopped = tuple(rank for rank, pid in ranks.items() if _is_stopped(pid))
    own = Dump(rank, activity.where, activity.seconds, waiting, _stacks(), tuple(ranks), stopped)
    with suppress(OSError):  # the parent has ended the wait
        own.save(folder / HANG / f"{'launcher' if rank is None else f'rank-{rank}'}.json")
    if rank is not None:
        with suppress(Exception):  # torch promises nothing of it, and later signals must be heard
            _write_collectives(folder / FLIGHT_RECORDER, rank)


def _write_collectives(folder: Path, rank: int) -> None:
    """Write the last collectives and messages of this process as a pickle, if it has met others: those of NCCL where it
    has a GPU, else gloo's. torch's flight recorder keeps 2000 of them, or TORCH_FR_BUFFER_SIZE."""
    c10d, recorder = (sys.modules.get(f"torch.{name}") for name in ("distributed", "_C._distributed_c10d"))
    if c10d is None or recorder is None or not c10d.is_initialized():
        return
    name = "_dump_nccl_trace" if "nccl" in c10d.get_backend_config() else "_dump_fr_trace"
    if written := getattr(recorder, name, bytes)():
        folder.mkdir(exist_ok=True)
        (folder / f"rank_{rank}").write_bytes(written)


def _is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def _stacks() -> str:
    with open(os.memfd_create("stacks"), "w+b") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


def explain(
    folder: Path, names: RankNames, worker: int, count: int | None, signal_all: Callable[[], None], log: IO[bytes]
) -> str:
    """Have the processes say what they do, put their stacks in the log; returns who holds up the run.

    A process may be late and write after that: once all have ended, `remove_dumps`.
    `worker` is the process id of what the parent has started; `count` that of the ranks, where no process has forked
    them and knows how many there are.
    """
    shutil.rmtree(folder / FLIGHT_RECORDER, ignore_errors=True)  # of an earlier start
    with suppress(OSError):  # where the disk is full there are no stacks
        if (folder / HANG).is_file():
            (folder / HANG).unlink()
        (folder / HANG).mkdir(exist_ok=True)
    signal_all()
    dumps = _collected(folder / HANG, count)
    for one in dumps:
        what = f"{_name(one, names)} {one.where}".strip()
        log.write(f"\n--- {what}, Python stacks:\n{one.stacks}".encode())
    log.flush()
    who = reason(dumps, names, count, _is_stopped(worker))
    recorded = (folder / FLIGHT_RECORDER).is_dir()
    return f"{who}, the last collectives of each rank in {FLIGHT_RECORDER}/" if recorded else who


def remove_dumps(folder: Path) -> None:
    """Remove what processes that have ended wrote."""
    shutil.rmtree(folder / HANG, ignore_errors=True)


def _collected(folder: Path, count: int | None) -> list[Dump]:
    """The dumps, in the order of the ranks: once all are there, or at the end of the time for it."""
    deadline = time.monotonic() + DUMP_S
    while True:
        dumps = []
        for path in folder.glob("*.json"):
            with suppress(SchemaError, OSError):
                dumps.append(Dump.load(path))
        if time.monotonic() > deadline or (dumps and not silent(dumps, count)):
            return sorted(dumps, key=lambda one: -1 if one.rank is None else one.rank)
        time.sleep(LOOK_S)


def silent(dumps: Sequence[Dump], count: int | None) -> list[int]:
    """The ranks that wrote nothing."""
    expected = set(range(count or 0)).union(*(one.ranks for one in dumps))
    return sorted(expected - {one.rank for one in dumps if one.rank is not None})


def reason(dumps: Sequence[Dump], names: RankNames, count: int | None = None, worker_stopped: bool = False) -> str:
    """Who holds up the run, and whose stacks are in the log."""
    there = [one for one in dumps if one.stacks]
    if not there and not count:
        return _silence(names.worker, worker_stopped)
    if quiet := silent(dumps, count):
        stopped = {rank for one in dumps for rank in one.stopped}
        whats = [_silence(names.rank(rank), rank in stopped) for rank in quiet]
        others = "; the stacks of the others are in the log" if any(one.rank is not None for one in there) else ""
        return f"{', '.join(whats)}{others}"
    ranks = [one for one in there if one.rank is not None] or there
    first = min(ranks, key=lambda one: (one.waiting, -one.seconds))
    if len(ranks) == 1:
        return f"{_standstill(first, names)}; its Python stacks are in the log"
    busy = [one for one in ranks if one.waiting == 0] or [first]
    said = ", ".join(_standstill(one, names) for one in busy[:NAMED])
    if len(busy) > NAMED:
        said += f", and so did {len(busy) - NAMED} others"
    if first.waiting == 2:
        said += ", all ranks wait for others, it for the longest time"
    elif len(busy) < len(ranks):
        said += ", the others wait"
    return f"{said}; all Python stacks are in the log"


def _standstill(one: Dump, names: RankNames) -> str:
    since = f" for {one.seconds:.0f} s" if one.seconds and one.rank is not None else ""
    return " ".join(filter(None, (_name(one, names), "made no progress", one.where))) + since


def _silence(who: str, stopped: bool) -> str:
    why = "it is stopped (SIGSTOP)" if stopped else "it is stopped, or does not run Python code"
    return f"{who} made no progress and wrote no Python stack: {why}"


def _name(one: Dump, names: RankNames) -> str:
    return names.worker if one.rank is None else names.rank(one.rank)
