"""A run's checkpoints, as its ranks write and read them.

    {"session":  Session.state_dict(): weights, the optimizer's state, steps done, by the names of the whole model
     "random":   of each rank, torch's generators
     "peak_memory_bytes":  as it was metered}

What follows from the step alone is not in it: batches, and masks of dropout. The session's part moves between engines.
Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from harness.core.run_files import STOP
from harness.interfaces import Session
from harness.run import checkpoint_files
from harness.run.checkpoint_files import after_steps


class Checkpoints:
    """The checkpoints of one run, which has done `start` steps: after every `every` of them (0: never), and at a stop.

    Each rank has one; its methods are collective. Rank 0 looks for a stop request, writes, and `say`s what it does.
    """

    def __init__(
        self, run_dir: Path, start: int = 0, every: int = 0, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self.run_dir, self.start, self.every = run_dir, start, every
        self._print = say

    def load(self, session: Session) -> list[int] | None:
        """Bring the session to where it resumes; returns the peak memory of each device as it was metered before."""
        if not self.start:
            return None
        path = checkpoint_files.place(self.run_dir, self.start)
        saved = torch.load(path, weights_only=True, mmap=True)  # several ranks read one file
        session.load_state_dict(saved["session"])
        self._say(f"resuming {after_steps(self.start)}")
        if len(saved["random"]) == _size():
            _draw_from(saved["random"][_rank()])
        else:
            self._say(f"torch's generators start again: they were those of {len(saved['random'])} ranks, not {_size()}")
        peak: list[int] | None = saved["peak_memory_bytes"]
        return peak

    def after_step(self, session: Session, step: int, peak: list[int] | None, sync: Callable[[], None]) -> bool:
        """After `step` steps: write a checkpoint if it is time for one; `sync` has other files on the disk before.

        Returns whether training must stop.
        """
        stop = bool(from_rank_0(int((self.run_dir / STOP).exists())))
        if stop or (self.every and step % self.every == 0):
            self._save(session, step, peak, sync)
        return stop

    def _save(self, session: Session, step: int, peak: list[int] | None, sync: Callable[[], None]) -> None:
        """Write a checkpoint; if that fails the run continues, and the last checkpoint stays."""
        state = {"session": session.state_dict(), "random": _gathered(_generators()), "peak_memory_bytes": peak}
        if _rank():
            return

        def fill(file: IO[bytes]) -> None:
            torch.save(state, file)

        try:
            sync()
            checkpoint_files.write(self.run_dir, step, fill)
            self._say(f"checkpoint {after_steps(step)}")
        except (OSError, RuntimeError) as error:  # torch's own writer raises no OSError
            self._say(f"no checkpoint {after_steps(step)}, older ones stay: {error}")

    def _say(self, text: str) -> None:
        if _rank() == 0:
            self._print(text)


def from_rank_0(value: int) -> int:
    """Rank 0's value, in all ranks."""
    if not dist.is_initialized():
        return value
    known = torch.tensor(value, device="cuda" if dist.get_backend() == "nccl" else "cpu")
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
    """The state of torch's generators, which layers draw from that are none of `harness.nn.dropout`."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def _draw_from(saved: dict[str, Any]) -> None:
    torch.set_rng_state(saved["cpu"].clone())
    if saved["cuda"]:
        torch.cuda.set_rng_state_all([state.clone() for state in saved["cuda"]])
