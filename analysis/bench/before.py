"""Step times of this checkout next to those of an earlier commit, in turns: is an engine slower than it was?

    make bench ARGS="--before c58d4ec8"         ROUNDS=60 for an interval of about one percent

    this checkout   |step|            |step||step|            |step|        A round has one turn of each
    the commit            |step||step|            |step||step|

Each has processes of its own: this file is run with the modules of either tree. The commit's is unpacked into a
temporary folder, and has had what is imported here, or cannot be compared. Stages have equally many layers, since those
that are measured may be cut in another place each time. Both trees run with the packages that are installed here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from analysis.bench.entries import prepared, profiled
from analysis.bench.results import ROOT
from analysis.bench.round_robin import Times
from analysis.bench.worker import EntryProcess
from harness.core.cluster import Device, Link
from harness.host.machine import Machine
from harness.races import verdict

Row = dict[str, Any]
SHARED = ("batch.size=8", "batch.micro_batches=4")
MODELS = {
    "U-Net": ("model=unet", "model.convs=2", "model.channels=16", "model.size=64", *SHARED),
    "GPT": ("model=gpt", "model.hidden=128", "model.sequence=128", *SHARED),
}
ENTRIES = {
    "single": ("engine=single",),
    "gpipe": ("engine=gpipe", "engine.checkpoint=never", "planner=uniform"),
    "myelin": ("engine=myelin", "planner=uniform"),
}

GONE_S = 60.0
"""How long a process has to end its ranks."""


class Entry:
    """An engine of one of the trees, in a process that waits for its turns."""

    def __init__(self, tree: Path, keys: Sequence[str]) -> None:
        self.name = " ".join(keys)
        command = [sys.executable, "-P", __file__, *keys]
        environment = os.environ | {"PYTHONPATH": str(tree)}
        self.process = subprocess.Popen(
            command, cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Entry:
        return self

    def __exit__(self, *error: object) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(GONE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def step(self) -> float:
        """Return the seconds of a step. Raises RuntimeError if it has none: its process has said why."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"{self.name} has ended")
        return float(line)


def compared(commit: str, rounds: int) -> list[Row]:
    """The time of a step / that of an earlier commit, with its 95 % interval: above 1, engines have become slower."""
    with unpacked(commit) as earlier:
        return [
            _row(model, name, commit, *in_turns([*keys, *own], (ROOT, earlier), rounds))
            for model, keys in MODELS.items()
            for name, own in ENTRIES.items()
        ]


@contextmanager
def unpacked(commit: str) -> Iterator[Path]:
    """Within it the files of a commit are in a folder."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
        yield Path(folder)


def in_turns(keys: Sequence[str], trees: Sequence[Path], rounds: int) -> list[list[float]]:
    """The step times of each tree; every other round the last one is first. The first turns are a warm-up."""
    taken: list[list[float]] = [[] for _ in trees]
    with ExitStack() as stack:
        both = [stack.enter_context(Entry(tree, keys)) for tree in trees]
        for number in range(1 + rounds):
            order = range(len(both)) if number % 2 else reversed(range(len(both)))
            for place in order:
                took_s = both[place].step()
                if number:
                    taken[place].append(took_s)
    return taken


def _row(model: str, name: str, commit: str, now_s: list[float], before_s: list[float]) -> Row:
    times, found = Times(tuple(now_s)), verdict.ratio(before_s, now_s)
    row: Row = {"model": model, "entry": name, "step": verdict.step_time_s(now_s), "quartiles": [*times.spread_s]}
    return row | {f"time / {commit}": found.value, "interval": [found.low, found.high]}


def serve(keys: Sequence[str]) -> None:
    """The process of an entry: a line on stdin asks for a step, a line on stdout has its seconds; until stdin ends."""
    seconds = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed
    torch.set_num_threads(1)  # so that processes that are forked inherit no pool of threads
    here = Machine(Device("cpu", 8 * 10**9, {"float32": 1e10}, 1e10, 1e-6), Link(1e-5, 1e-9), cores=2.0)
    entry = prepared(keys, profiled([key for key in keys if not key.startswith(("engine", "planner"))]), here)
    torch.manual_seed(0)
    batch = entry.model.sample(entry.profile.micro_batch * entry.plan.micro_batches * entry.plan.mesh.data)
    with EntryProcess(entry, batch) as process:
        for _ in sys.stdin:
            took_s = process.step()
            if process.failed:
                sys.exit(process.failed)
            print(took_s, file=seconds)


if __name__ == "__main__":
    serve(sys.argv[1:])
