"""Configuration of the deepspeed engine."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from harness.config_check import closest
from harness.installed import problem_line

if TYPE_CHECKING:
    from engines.deepspeed.engine import DeepSpeedEngine

VERSION = "0.19"
"""What is mended in DeepSpeed is mended in its insides, which other versions may have elsewhere."""
STAGES = (0, 1, 2, 3)
CHECKPOINT = ("never", "always")
BUCKET = 500_000_000
"""Elements that DeepSpeed sums or gathers at once."""


@dataclass
class Config:
    name: str = "deepspeed"
    """The engine."""
    zero: int = 0
    """What lies in shards over the replicas: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too. 2 and 3 have
    no pipeline; 0 in half precision is Megatron-LM, for described clusters only."""
    checkpoint: str = "never"
    """Which micro-batches are recomputed in the backward pass: never or always. Stages are recomputed whole, but where
    their products are split (mesh.tensor, described clusters only) layer by layer."""
    offload: bool = False
    """ZeRO-Offload: optimizer state and step on the CPU (zero 1 to 3, adam or adamw). It compiles DeepSpeed's cpu_adam,
    once, which takes minutes: on a busy machine with launch.timeout_s=1800."""


def check(config: Config) -> None:
    """Raise ValueError with a line for each value that no run can have."""
    wrong = []
    wrong += problem_line("deepspeed", "deepspeed", "pip install 'deepspeed>=0.19,<0.20'", VERSION)
    if config.zero not in STAGES:
        nearest = min(max(config.zero, 0), 3)
        wrong.append(f"engine.zero {config.zero}   is none of 0, 1, 2, 3   -> engine.zero={nearest}")
    if config.checkpoint not in CHECKPOINT:
        what = f"is none of {', '.join(CHECKPOINT)}"
        meant = closest(config.checkpoint, CHECKPOINT[::-1])
        wrong.append(f"engine.checkpoint {config.checkpoint}   {what}   -> engine.checkpoint={meant}")
    if config.offload and config.zero == 0:
        wrong.append("engine.offload true   needs state in shards, engine.zero is 0   -> engine.zero=1")
    if config.offload and (missing := _missing_tools()):
        what = f"compiles cpu_adam, and there is no {' and no '.join(missing)}"
        commands = " and ".join(missing.values())
        wrong.append(f"engine.offload true   {what}   -> {commands}, or engine.offload=false")
    if wrong:
        raise ValueError("\n".join(wrong))


def _missing_tools() -> dict[str, str]:
    """What torch compiles with and this machine has not, each with the command that mends it."""
    compiler = (os.environ.get("CXX") or "c++").split()[0]
    missing = {}
    if shutil.which(compiler) is None:
        missing[f"C++ compiler ({compiler})"] = "apt-get install g++"
    if shutil.which("ninja") is None and find_spec("ninja") is None:
        missing["ninja"] = "pip install ninja"
    return missing


def build(config: Config) -> DeepSpeedEngine:
    from engines.deepspeed.engine import DeepSpeedEngine

    return DeepSpeedEngine(config)
