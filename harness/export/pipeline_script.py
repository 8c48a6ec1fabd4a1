"""Train a model as it was planned, with torch.distributed.pipelining.

    torchrun --nproc-per-node RANKS FILE

Rank = replica * PIPELINE + device. `network` is the part to replace for a model, batches and a loss of another origin.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.utils.checkpoint import checkpoint

from harness.config import registry
from harness.core.plan import Mesh, Plan, Stage
from harness.interfaces import Batch, OptimizerSpec, SessionSpec
from harness.runtime.boundary_shapes import BoundaryShapes
from harness.runtime.stage_module import StageModule, stage_modules
from harness.runtime.tied_weights import TiedWeights
from harness.runtime.training_state import cast_batch, initial_layers, make_optimizer, split_batch
from harness.runtime.values import placed, tensors_of

# The plan begins here.
STAGES: list[tuple[int, int, int]] = []
"""First layer, last layer and device of each stage."""
SCHEDULE = "GPipe"
DATA, PIPELINE, MICRO_BATCHES, BATCH = 1, 1, 1, 1
"""Replicas, devices of each, micro-batches of each, samples of a step."""
RECOMPUTE = False
DTYPE = "float32"
AUTOCAST: str | None = None
OPTIMIZER: dict[str, Any] = {}
SEED, STEPS = 0, 1
CHOSEN: dict[str, Any] = {}
"""The configuration of the model and of its data."""
# The plan ends here.


def network() -> tuple[nn.Sequential, Callable[[int], Batch], Callable[[Tensor, Tensor], Tensor]]:
    """The layers, the same on every rank; the whole batch of a step; the loss, summed over the samples it is given."""
    chosen = OmegaConf.create(CHOSEN)
    model = registry.build("model", chosen.model)
    data = registry.build("data", chosen.data, model, SEED)
    layers = initial_layers(model, SessionSpec((), dtype=DTYPE, seed=SEED))
    return layers, lambda step: cast_batch(data.batch(step, BATCH), DTYPE), model.loss


class Recomputed(nn.Module):
    """A stage that keeps its input alone, and runs again in the backward pass."""

    def __init__(self, stage: StageModule) -> None:
        super().__init__()
        self.stage = stage
        stage.recomputes = True

    def forward(self, *arrived: Tensor) -> Any:
        key, again = self.stage.key, iter((False, True))

        def run(*values: Tensor) -> Any:
            self.stage.at(*key, again=next(again))
            return self.stage(*values)

        return checkpoint(run, *arrived, use_reentrant=False)


class KeyedStage(PipelineStage):
    """Dropout masks follow from the step and the micro-batch, as in every scheme of Regatta."""

    module: StageModule
    step, replica = 0, 0

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.module.at(SEED, self.step, self.replica * MICRO_BATCHES + fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)


def main() -> None:
    """Train for `STEPS`; rank 0 prints the loss of each, the mean over the samples of the batch."""
    gpus = torch.cuda.is_available()
    kind = "cuda" if gpus else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if gpus else "gloo")
    mesh = init_device_mesh(kind, (DATA, PIPELINE), mesh_dim_names=("data", "pipeline"))
    replica, place = dist.get_rank() // PIPELINE, dist.get_rank() % PIPELINE

    layers, batch, loss = network()
    plan = Plan(Mesh(DATA, PIPELINE), tuple(Stage(*stage) for stage in STAGES), MICRO_BATCHES)
    shapes = BoundaryShapes(layers, plan, device, getattr(torch, AUTOCAST) if AUTOCAST else None)
    modules = stage_modules(layers, plan, [j for j, stage in enumerate(plan.stages) if stage.device == place])
    _go_back((*shapes.stages, *modules))
    for module in modules:
        module.to(device)
        module.autocast = getattr(torch, AUTOCAST) if AUTOCAST else None
    parameters = list(nn.ModuleList(modules).parameters())
    tied = TiedWeights(layers, plan, dist.get_rank())
    optimizer = make_optimizer(parameters, OptimizerSpec(**OPTIMIZER))

    example = split_batch(split_batch(batch(0), DATA)[replica], MICRO_BATCHES)[0]
    passing = shapes.boundaries(tensors_of(example.inputs))
    stages = [_stage(module, passing, device, mesh["pipeline"].get_group(), replica) for module in modules]
    chosen: Any = get_schedule_class(SCHEDULE)
    several = issubclass(chosen, PipelineScheduleMulti)
    schedule = chosen(
        stages if several else stages[0],
        MICRO_BATCHES,
        loss_fn=lambda output, number: loss(output, targets[int(number)]) / BATCH,
        scale_grads=False,
    )
    targets: list[Any] = []  # of each micro-batch: the library hands out their numbers, as it splits one tensor alone
    first, last = (any(getattr(stage, end) for stage in stages) for end in ("is_first", "is_last"))

    for step in range(STEPS):
        start = time.perf_counter()
        own = split_batch(batch(step), DATA)[replica]
        for stage in stages:
            stage.step = step
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        inputs = tensors_of(placed(own.inputs, device)) if first else ()
        targets[:] = [placed(part.targets, device) for part in split_batch(own, MICRO_BATCHES)] if last else []
        ends = {"target": torch.arange(MICRO_BATCHES), "losses": losses} if last else {}
        schedule.step(*inputs, **ends, return_outputs=False)
        for parameter in parameters if DATA > 1 else ():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=mesh["data"].get_group())
        tied.sum_gradients(time.perf_counter, lambda *_: None)
        optimizer.step()
        total = torch.tensor(float(sum(one.detach() for one in losses)), dtype=torch.float64, device=device)
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {step}  loss {float(total):.9g}  {time.perf_counter() - start:.4f} s", flush=True)
    dist.destroy_process_group()


def _go_back(modules: Iterable[StageModule]) -> None:
    """Halves of a backward pass need the gradient of an input, also of one that only frozen layers come before."""
    for module in modules:
        module.ungraded_in.clear()
        module.ungraded_out.clear()


def _stage(
    module: StageModule, passing: list[Any], device: torch.device, group: dist.ProcessGroup, replica: int
) -> KeyedStage:
    """The stage as the library runs it, with the tensors that enter and leave it."""
    run = Recomputed(module) if RECOMPUTE else module
    j = module.number
    made = KeyedStage(run, j, len(STAGES), device, input_args=passing[j], output_args=passing[j + 1], group=group)
    made.module, made.replica = module, replica
    return made


if __name__ == "__main__":
    main()
