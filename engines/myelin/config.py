"""Configuration of the myelin engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from harness.config_check import closest
from harness.schedule.myelin import ORDERS
from harness.schedule.rule import RULES

if TYPE_CHECKING:
    from engines.myelin.engine import MyelinEngine

TRANSPORTS = ("mpi", "torch")
POLICIES = tuple(rule for rule in RULES if rule != "in_order")
LARGEST = 2**40


@dataclass
class Config:
    DEGREES: ClassVar[dict[str, str]] = {"g_inter": "pipeline", "g_data": "data"}

    name: str = "myelin"
    """The engine."""
    g_inter: int | None = None
    """The paper's name of mesh.pipeline."""
    g_data: int | None = None
    """The paper's name of mesh.data."""
    order: str = "message_driven"
    """Which task runs next. message_driven: one whose message has arrived (Algorithms 1 and 2); 1f1b, gpipe: a fixed
    order, over the same transport."""
    policy: str = "fifo"
    """Which one where several are ready: fifo, forward_first, backward_first or alternate."""
    pipeline_limit: int | None = None
    """Micro-batches that are in the pipeline at once, at most; as many as stages where it is not given."""
    transport: str = "mpi"
    """What carries messages between stages: mpi, or torch (torch.distributed)."""
    checkpoint_every: str = "never"
    """Layers from one checkpoint of activations to the next: never, a number, or auto (the paper's rule)."""
    offload: bool = False
    """Float32 weights and the optimizer's state live in the host's memory, and visit the device in buckets."""
    bsize: int = 16_000_000
    """Parameters of a bucket."""
    k: int = 4
    """Buckets of a chunk: its gradients are summed while the chunk before is optimized. 0: one after the other."""
    loss_scale: float | None = None
    """Of float16; found by trial where it is not given."""


def check(config: Config) -> None:
    """Raise ValueError with a line for each value that no run can have."""
    wrong = []
    for key, known in (("order", ORDERS), ("policy", POLICIES), ("transport", TRANSPORTS)):
        value = getattr(config, key)
        if value not in known:
            meant = closest(value, known)
            wrong.append(f"engine.{key} {value}   is none of {', '.join(known)}   -> engine.{key}={meant}")
    every = config.checkpoint_every
    if every not in ("never", "auto") and not (every.isdecimal() and 0 < int(every) < LARGEST):
        wrong.append(f"engine.checkpoint_every {every}   is neither never, auto nor a number of layers   "
                     "-> engine.checkpoint_every=auto")  # fmt: skip
    for key, least in (("pipeline_limit", 1), ("bsize", 1), ("k", 0)):
        value = getattr(config, key)
        if value is not None and not least <= value < LARGEST:
            what = f"is not at least {least}" if value < least else f"is more than {LARGEST - 1}"
            usual = getattr(Config(), key) or "null"
            wrong.append(f"engine.{key} {value}   {what}   -> engine.{key}={usual}")
    if config.loss_scale is not None and not 0 < config.loss_scale < float("inf"):
        wrong.append(f"engine.loss_scale {config.loss_scale:g}   is not positive   -> engine.loss_scale=null")
    if wrong:
        raise ValueError("\n".join(wrong))


def build(config: Config) -> MyelinEngine:
    from engines.myelin.engine import MyelinEngine

    return MyelinEngine(config)
