"""Configuration of the torch_pipelining engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.config_check import closest

if TYPE_CHECKING:
    from engines.torch_pipelining.engine import TorchPipeliningEngine

SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "zbv")
CHUNKS = 2


@dataclass
class Config:
    """`engines.torch_pipelining.engine` tells what each schedule asks for, and what the library cannot do."""

    name: str = "torch_pipelining"
    """The engine."""
    schedule: str = "gpipe"
    """The order of tasks: gpipe (ScheduleGPipe), 1f1b (Schedule1F1B), interleaved1f1b (ScheduleInterleaved1F1B, several
    stages on each device) or zbv (ScheduleZBVZeroBubble, two stages on each device)."""
    chunks: int = CHUNKS
    """How many stages each device has with schedule=interleaved1f1b; zbv has two, the others have one."""


def check(config: Config) -> None:
    """Raise ValueError with a line for each value that no run can have."""
    wrong = []
    if config.schedule not in SCHEDULES:
        wrong.append(
            f"engine.schedule {config.schedule}   is none of {', '.join(SCHEDULES)}   "
            f"-> engine.schedule={closest(config.schedule, SCHEDULES)}"
        )
    key = f"engine.chunks {config.chunks}"
    if config.schedule == "interleaved1f1b" and config.chunks < 2:
        wrong.append(f"{key}   must be at least 2 with interleaved1f1b   -> engine.chunks=2, or engine.schedule=1f1b")
    there = {"gpipe": 1, "1f1b": 1, "zbv": 2}.get(config.schedule)
    if there and config.chunks not in (there, CHUNKS):
        what = f"engine.schedule={config.schedule} has {there} on each device"
        wrong.append(f"{key}   {what}   -> engine.schedule=interleaved1f1b, or no engine.chunks")
    if wrong:
        raise ValueError("\n".join(wrong))


def build(config: Config) -> TorchPipeliningEngine:
    from engines.torch_pipelining.engine import TorchPipeliningEngine

    return TorchPipeliningEngine(config)
