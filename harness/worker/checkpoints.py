"""A run's checkpoints, as its ranks write and read them.

    {"session":  Session.state_dict(): weights, the optimizer's state, steps done, by the names of the whole model;
                 the weights of a module that was split into layers by its own names, as it loads them
     "random":   of each rank, the generators of torch, Python and NumPy
     "left":     of each rank, what passes have left in its modules (`harness.worker.pass_state`)
     "peak_memory_bytes", "reserved_memory_bytes":  of each device, as they were metered}

With `launch.sharded_checkpoints` "session" is without what ranks have in shards: that is in the folder next to the file
(`harness.worker.sharded_checkpoint`), by the same names. What follows from the step alone is not in it: batches, and
masks of dropout. The session's part moves between engines. Next to it the file has the run up to this step
(`harness.run.checkpoint_files.RunState`).
Importing this module imports torch.
"""

from __future__ import annotations

import io
import pickle
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from harness.core.record import RunRecord
from harness.core.run_files import RECORD, STOP
from harness.interfaces import Session, ShardedSession, StepMetrics
from harness.run import checkpoint_files
from harness.run.checkpoint_files import RunState, after_steps
from harness.worker import sharded_checkpoint
from harness.worker.pass_state import PassState

NO_STATE = RunState(0)


class NotLoaded(RuntimeError):
    """A checkpoint that holds something else than tensors and plain values."""


@dataclass(frozen=True)
class When:
    """When a checkpoint is written: after `every` so many steps (0: never), and at the `end` of the last one."""

    every: int = 0
    end: bool = False


NEVER = When()


@dataclass(frozen=True)
class Metered:
    """The memory of each device in the step that was metered; None before that, and what the device does not have."""

    peak_memory_bytes: list[int] | None = None
    reserved_memory_bytes: list[int] | None = None

    def after(self, step: StepMetrics) -> Metered:
        peak = step.peak_memory_bytes or self.peak_memory_bytes
        return Metered(peak, step.reserved_memory_bytes or self.reserved_memory_bytes)


class Checkpoints:
    """The checkpoints of one run, which has done `start` steps: those of `when`, and one at a stop.

    Each rank has one; its methods are collective. Rank 0 looks for a stop request, writes, and `say`s what it does.
    `state` is what the run is; `error` says why the last step has no checkpoint that it should have, for the user.
    """

    def __init__(
        self,
        run_dir: Path,
        start: int = 0,
        when: When = NEVER,
        say: Callable[[str], None] = lambda text: None,
        state: RunState = NO_STATE,
        sharded: bool = False,
    ) -> None:
        self.run_dir, self.start, self.when, self.state, self.sharded = run_dir, start, when, state, sharded
        self.error: dict[str, Any] | None = None
        self._passes = PassState()
        self._print = say

    def load(self, session: Session) -> Metered:
        """Before the first step: bring the session to where it resumes; returns the memory as it was metered before."""
        self._passes = PassState(session.pass_modules, session.plan.mesh.data > 1)
        if not self.start:
            return Metered()
        path = checkpoint_files.place(self.run_dir, self.start)
        try:
            saved = torch.load(path, weights_only=True, mmap=True)  # several ranks read one file
            state = _by_layer(saved["session"], session)
            if saved.get("sharded"):
                state = self._with_shards(state, session)
        except pickle.UnpicklingError:  # its text would have the user switch the check off
            raise NotLoaded(f"{path} holds more than weights and is not loaded: remove it to resume before") from None
        session.load_state_dict(state)
        self._say(f"resuming {after_steps(self.start)}")
        if len(saved["random"]) == _size():
            _draw_from(saved["random"][_rank()])
            self._passes.put(saved.get("left", [{}] * _size())[_rank()])
        else:
            self._say(f"random generators start again: they were those of {len(saved['random'])} ranks, not {_size()}")
        return Metered(saved["peak_memory_bytes"], saved.get("reserved_memory_bytes"))

    def after_step(self, session: Session, step: int, total: int, memory: Metered, lines: Sequence[str]) -> bool:
        """After `step` of `total` steps, with their `lines` in rank 0: write a checkpoint if it is time for one.

        Returns whether training must stop.
        """
        self.error = None
        last = step == total
        stop = not last and bool(from_rank_0(int((self.run_dir / STOP).exists())))
        if stop or (self.when.end if last else self.when.every and step % self.when.every == 0):
            self._save(session, step, memory, lines)
        return stop

    def _save(self, session: Session, step: int, memory: Metered, lines: Sequence[str]) -> None:
        """Write a checkpoint; if that fails the run continues, and the last checkpoint stays."""
        whole, shards = cast(ShardedSession, session).sharded_state() if self.sharded else (session.state_dict(), {})
        saved = {
            "session": _by_module(whole, session),
            "random": _gathered(_generators()),
            "left": _gathered(self._passes.changed()),
            "sharded": self.sharded,
            **vars(memory),
        }
        state = replace(self.state, step=step, lines=tuple(lines))
        of_shards = sum(_gathered(sharded_checkpoint.size_of(shards)))
        try:
            if self.sharded:
                state = replace(state, shards=self._write_shards(_by_module(shards, session), step))
            if _rank():
                return
            checkpoint_files.write(self.run_dir, state, lambda file: torch.save(saved, file))
            self._say(f"checkpoint {after_steps(step)}")
        except OSError as error:
            if _rank():
                return
            with suppress(OSError):  # it counts for nothing
                checkpoint_files.remove_folder(checkpoint_files.shards_of(self.run_dir, step))
            self.error = {
                "message": error.strerror or str(error),
                "needed_bytes": _size_of(saved) + of_shards + sum(map(len, lines)),
                "free_bytes": shutil.disk_usage(self.run_dir).free,
            }
            self._say(f"no checkpoint {after_steps(step)}, older ones stay: {error}")

    def _write_shards(self, shards: dict[str, Any], step: int) -> dict[str, int]:
        """Have each rank write its own; return the checksums of all files. An error of one is raised in all."""
        folder = checkpoint_files.shards_of(self.run_dir, step)
        sums = sharded_checkpoint.write(folder, shards)
        return dict(item for own in _gathered(sums) for item in own.items())

    def _with_shards(self, state: dict[str, Any], session: Session) -> dict[str, Any]:
        """Return the state, with the shards of the folder next to its file."""
        folder = checkpoint_files.shards_of(self.run_dir, self.start)
        shards = cast(ShardedSession, session).empty_shards(sharded_checkpoint.optimizer_keys(folder))
        sharded_checkpoint.read(folder, _by_module(shards, session))
        optimizer = {name: {**shards["optimizer"].get(name, {}), **own} for name, own in state["optimizer"].items()}
        model, optimizer = state["model"] | shards["model"], shards["optimizer"] | optimizer
        return {**state, "model": model, "optimizer": optimizer}

    def _say(self, text: str) -> None:
        if _rank() == 0:
            self._print(text)


def _by_module(state: dict[str, Any], session: Session) -> dict[str, Any]:
    """A session's state with the weights under the names that they have in the user's module."""
    names = session.module_names
    model = state.get("model", {})
    return {**state, "model": {names.get(name, name): value for name, value in model.items()}} if names else state


def _by_layer(state: dict[str, Any], session: Session) -> dict[str, Any]:
    """The inverse; files of earlier versions have the names of the layers already."""
    names = session.module_names
    model = state.get("model", {})
    found = {name: model[own if own in model else name] for name, own in names.items() if {own, name} & model.keys()}
    return {**state, "model": found} if names else state


def run_state(run_dir: Path) -> RunState:
    """What checkpoints say of the run in this folder: what its record says before the first step."""
    record = RunRecord.load(run_dir / RECORD)
    return RunState(0, record.config, record.plan, record.id, record.manifest)


class _Counter(io.RawIOBase):
    """A file that counts what is written to it, and keeps nothing."""

    size = 0

    def write(self, data: Any) -> int:
        self.size += len(data)
        return len(data)


def _size_of(saved: dict[str, Any]) -> int:
    """The bytes of a file with this."""
    counter: Any = _Counter()
    torch.save(saved, counter)
    size: int = counter.size
    return size


def from_rank_0(value: int) -> int:
    """Rank 0's value, in all ranks."""
    if not dist.is_initialized():
        return value
    known = torch.tensor(value)
    dist.broadcast(known, 0)
    return int(known)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _gathered(own: Any) -> list[Any]:
    """Gather each rank's value on rank 0."""
    if not dist.is_initialized():
        return [own]
    found: list[Any] | None = [None] * _size() if _rank() == 0 else None
    dist.gather_object(own, found)
    return found or []


def _generators() -> dict[str, Any]:
    """The states of the generators that layers draw from which are none of `harness.nn.dropout`."""
    numbers: Any = np.random.get_state()
    return {
        "cpu": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(gpu) for gpu in _own_gpus()],
        "python": random.getstate(),
        "numpy": (numbers[0], numbers[1].tolist(), *numbers[2:]),
    }


def _draw_from(saved: dict[str, Any]) -> None:
    torch.set_rng_state(saved["cpu"].clone())
    if "python" in saved:  # files of earlier versions have those of torch alone
        random.setstate(saved["python"])
        np.random.set_state(saved["numpy"])
    for gpu, state in zip(_own_gpus(), saved["cuda"], strict=False):  # those beyond were seen, and not used
        torch.cuda.set_rng_state(state.clone(), gpu)


def _own_gpus() -> Sequence[int]:
    """The GPUs whose generators are this process's: a rank's own one; without ranks the first ones that it sees."""
    if not torch.cuda.is_initialized():
        return ()
    return (torch.cuda.current_device(),) if dist.is_initialized() else range(torch.cuda.device_count())
