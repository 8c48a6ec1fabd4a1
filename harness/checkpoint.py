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

from harness import checkpoint_files
from harness.interfaces import Session
from harness.stopping import STOP


class Checkpoints:
    """Those of one run, which has done `begun` steps: after every `every` of them (0: never), and when it is to stop.

    Each rank has one; its methods are collective. Rank 0 reads what the parent asks, writes, and says so (`say`).
    """

    def __init__(
        self, run_dir: Path, begun: int = 0, every: int = 0, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self.run_dir, self.begun, self.every, self.say = run_dir, begun, every, say

    def begin(self, session: Session) -> list[int] | None:
        """Bring the session to where it goes on; the memory that was metered until then."""
        if not self.begun:
            return None
        path = checkpoint_files.place(self.run_dir, self.begun)
        saved = torch.load(path, weights_only=True, mmap=True)  # several ranks read one file
        session.load_state_dict(saved["session"])
        self.say(f"going on {checkpoint_files.after(self.begun)}")
        if len(saved["random"]) == _size():
            _draw_from(saved["random"][_rank()])
        else:
            self.say(f"torch's generators begin anew: they were those of {len(saved['random'])} ranks, not {_size()}")
        peak: list[int] | None = saved["peak_memory_bytes"]
        return peak

    def after(self, session: Session, step: int, peak: list[int] | None, before: Callable[[], None]) -> bool:
        """After so many steps: write a checkpoint if it is time for one, `before` which other files must be safe.

        Returns whether training is to stop.
        """
        stop = bool(told(int((self.run_dir / STOP).exists())))
        if stop or (self.every and step % self.every == 0):
            self._save(session, step, peak, before)
        return stop

    def _save(self, session: Session, step: int, peak: list[int] | None, before: Callable[[], None]) -> None:
        """A checkpoint that cannot be written is no reason to lose the run: the one before stays."""
        state = {"session": session.state_dict(), "random": _gathered(_generators()), "peak_memory_bytes": peak}
        if _rank():
            return

        def fill(file: IO[bytes]) -> None:
            torch.save(state, file)

        try:
            before()
            checkpoint_files.write(self.run_dir, step, fill)
            self.say(f"checkpoint {checkpoint_files.after(step)}")
        except (OSError, RuntimeError) as error:  # torch's own writer knows no OSError
            self.say(f"no checkpoint {checkpoint_files.after(step)}, older ones stay: {error}")


def told(value: int) -> int:
    """What rank 0 says, in all ranks."""
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
    """What each rank has; in rank 0 alone."""
    if not dist.is_initialized():
        return [own]
    found: list[Any] | None = [None] * _size() if _rank() == 0 else None
    dist.gather_object(own, found)
    return found or []


def _generators() -> dict[str, Any]:
    """The state of torch's generators, which layers draw from that are none of `harness.dropout`."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def _draw_from(saved: dict[str, Any]) -> None:
    torch.set_rng_state(saved["cpu"].clone())
    if saved["cuda"]:
        torch.cuda.set_rng_state_all([state.clone() for state in saved["cuda"]])
