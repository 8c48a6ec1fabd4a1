"""The torchgpipe engine: the PyPI package torchgpipe 0.0.7 (github.com/kakaobrain/torchgpipe), as its users get it.

What it cannot do:

* On CPU devices nothing overlaps. It has one worker thread for each torch device, and "cpu" is one torch device
  however many stages there are, so forward tasks run one after the other. The backward pass is autograd's, which runs
  in the calling thread for everything on the CPU. So a step takes as long as on one device, which is what is
  predicted (`serial_cpu_devices=True`). On GPUs, for which it was made, stages overlap.
* Its trace has whole steps, no tasks (`trace=False`), and on CPU devices what each of them holds cannot be reported
apart
  (`memory_meter=False`); on GPUs the allocator says it.
* Stages share no parameters: it refuses them on any devices. Layers of one stage may.
* A batch that the micro-batches do not divide is cut by `torch.chunk`, which may give fewer micro-batches.
* Its deferred batch norm takes the biased variance.
* An error in a layer's backward pass does not say which stage it comes from.
* With recomputation, or skips, stages of a frozen prefix are recomputed and get gradients all the same: zeros, so that
  their layers have no backward pass.

Three things are fixed, since runs could not be compared without: a recomputation does not update batch norm's running
statistics a second time, autocast holds in its worker threads, too, and a stage whose layers work in place gets copies.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

from harness.checks.values import not_installed
from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import ModelProfile
from harness.core.plan import Plan
from harness.core.problem import Problem
from harness.core.value_checks import one_of
from harness.interfaces import Capabilities, Engine, Model, Searched, Session, SessionSpec
from harness.schedule import Schedule
from harness.schedule.builders.gpipe import RECOMPUTE, gpipe
from harness.schedule.frozen_stages import without_frozen
from harness.schedule.tied_weight_ops import tied_stages
from harness.schedule.transfers import plan_transfers


@dataclass
class Config:
    """The options have torchgpipe's names.

    `engines.torchgpipe.engine` says what it cannot do: above all, on CPU devices none of its tasks overlap.
    """

    SEARCHED: ClassVar[dict[str, Searched]] = {"checkpoint": Searched(RECOMPUTE)}

    name: str = "torchgpipe"
    """The engine."""
    checkpoint: str = "except_last"
    """Which micro-batches are recomputed in the backward pass: always, except_last or never."""
    deferred_batch_norm: bool = False
    """Batch norm updates its running statistics once for the whole mini-batch (as torchgpipe does: with the biased
    variance)."""


def check(config: Config) -> list[Problem]:
    """Values that no run can have, and a torchgpipe that is not installed."""
    missing = not_installed("torchgpipe", "torchgpipe", "pip install -e .[peers]")
    return [*missing, *one_of("engine.checkpoint", config.checkpoint, RECOMPUTE, "except_last")]


def build(config: Config) -> TorchGPipeEngine:
    return TorchGPipeEngine(config)


class TorchGPipeEngine(Engine):
    capabilities = Capabilities(trace=False, memory_meter=False, serial_cpu_devices=True, mixed=False)

    def __init__(self, config: Config) -> None:
        self.config = config

    def check(self, plan: Plan, profile: ModelProfile, cluster: Cluster, memory: MemoryModel) -> list[Problem]:
        """Parameters that stages share, whatever devices the stages are on."""
        return [
            Problem(
                "mesh.pipeline",
                len(plan.stages),
                f"puts {name} into stages {' and '.join(map(str, stages))}, engine=torchgpipe takes it in 1 stage",
                ({"mesh.pipeline": 1}, {"engine": "gpipe"}),
            )
            for name, stages in tied_stages(plan, profile).items()
            if len(stages) > 1
        ]

    def schedule(self, plan: Plan, profile: ModelProfile) -> Schedule:
        """Return the schedule of `engine=gpipe` with dependency, streams and portals, as in the paper; GPUs follow
        it."""
        devices = [stage.device for stage in plan.stages]
        found = gpipe(plan.micro_batches, devices, plan_transfers(plan, profile, portals=True), plan.recompute)
        sends_zeros = plan.recompute != "never" or profile.skips
        return found if sends_zeros else without_frozen(found, plan, profile)

    def session(self, model: Model, plan: Plan, spec: SessionSpec) -> AbstractContextManager[Session]:
        from engines.torchgpipe.session import TorchGPipeSession

        return TorchGPipeSession(model, plan, spec, self.config)
