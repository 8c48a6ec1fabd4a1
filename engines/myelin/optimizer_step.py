"""The end of a step on one rank: gradients are all-reduced over replicas, then the optimizer updates the weights.

begin   there are no gradients
...     forward and backward passes of all micro-batches; the loss is multiplied by `scale`
finish  chunk 0   |= all_reduce =|= step =|
        chunk 1                  |= all_reduce =|= step =|            (config.k; 0: all sums, then all steps)
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.myelin.buckets import chunks
from engines.myelin.device_optimizer import DeviceOptimizer
from engines.myelin.flat_buffers import FlatBuffers
from engines.myelin.gradient_all_reduce import GradientAllReduce
from engines.myelin.host_optimizer import HostOptimizer
from engines.myelin.optimizers import Optimizer, Run
from harness.core.op import Op, Queue
from harness.core.problem import Problem
from harness.interfaces import SessionSpec
from harness.launch.process_group import is_first_rank
from harness.runtime.device_clock import TimePoint
from harness.runtime.loss_scale import LossScale, overflows

if TYPE_CHECKING:
    from engines.myelin.engine import Config


class OptimizerStep:
    """Parameters of one rank by their names in the whole model.

    They become views of one flat buffer, their gradients of another (`engines.myelin.flat_buffers`): until `finish` a
    gradient may also be another tensor, or None. A parameter that no replica has a gradient for is not updated, and
    its state does not count the step: as under torch's optimizers.

    In float16 and bfloat16 the parameters have float32 copies, which are what the optimizer updates, and what a state
    holds; gradients are summed in half precision. `group` are the ranks that have the same stage (None: only this
    one). The gradients of `tied` parameters are sums over all their copies already when `finish` begins: these lie
    after all others, out of reach of the chunks' sums. `note` and `now` are those of the `DistributedSession`. Raises
    ValueError for a parameter of another dtype than the others.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        tied: Collection[str],
        spec: SessionSpec,
        config: Config,
        stage: int,
        group: dist.ProcessGroup | None,
        now: Callable[[], TimePoint],
        note: Callable[[Op, TimePoint, TimePoint], None],
    ) -> None:
        self.stage, self.group, self.now, self.note = stage, group, now, note
        ordered = {name: parameters[name] for name in sorted(parameters, key=lambda name: name in tied)}
        self.flat = FlatBuffers(ordered, getattr(torch, spec.dtype))
        self.own = self.flat.size - sum(parameters[name].numel() for name in tied)  # elements to sum over replicas
        self.chunks = chunks(self.flat.size, config.bsize, config.k)
        self.queue: Queue = "network" if config.k else "compute"
        self.next_to = torch.cuda.Stream(self.flat.device) if self.flat.device.type == "cuda" else None
        self.optimizer = Optimizer(spec.optimizer)
        self.store: DeviceOptimizer | HostOptimizer = (
            HostOptimizer(self.flat, self.optimizer, config.bsize, stage, now, note)
            if config.offload
            else DeviceOptimizer(self.flat, self.optimizer, stage, now, note)
        )
        self.instead = spec.instead
        self.scaling = LossScale(config.loss_scale, self.instead) if spec.dtype == "float16" else None
        self.done = [0] * len(parameters)  # updates of each

    @property
    def scale(self) -> float:
        """The factor of the loss: 1 except in float16."""
        return self.scaling.value if self.scaling else 1.0

    @property
    def skipped(self) -> Problem | None:
        """Why the last step was no update; None if it was one."""
        if not (self.scaling and self.scaling.overflow):
            return None
        if self.scaling.fixed is not None:
            message, fix = f"is fixed: {self.scaling.overflow}", {"engine.loss_scale": None}
            return Problem("engine.loss_scale", self.scaling.fixed, message, (fix,))
        message = f"is too coarse: {self.scaling.overflow}, now the scale is {self.scale:g}"
        hint = "more steps, or a smaller engine.loss_scale"
        return Problem("precision.dtype", "float16", message, self.instead, hint)

    def begin(self) -> None:
        """A step begins."""
        self.flat.begin()

    @torch.no_grad()
    def finish(self) -> int:
        """Sum gradients over replicas and update. Bytes that were summed. Collective over all ranks.

        In float16 a step in which any rank's gradients are not finite is no update, anywhere, and the scale falls; it
        counts as one where their sum over replicas need not be finite, too. Raises FloatingPointError where the scale
        cannot fall any further.
        """
        there = torch.tensor(self.flat.collect_gradients(), dtype=torch.uint8, device=self.flat.device)
        overflow = self._overflow()
        asked = self._largest(there, self.group) if self.group and self.chunks else None
        sums = None
        if self.group:
            sums = GradientAllReduce(
                self.flat.gradients[: self.own],
                self.chunks,
                self.group,
                self.stage,
                self.queue,
                self.now,
                self.next_to,
            )
        skipped = overflow()
        if asked:
            asked.wait()
        self._update(sums, [bool(one) for one in there.tolist()], skipped)
        self._judge(skipped)
        return self.flat.gradients[: self.own].nbytes if self.group else 0

    def _overflow(self) -> Callable[[], bool]:
        """Asks all ranks at once; the answer is the same in all of them."""
        if self.scaling is None:
            return lambda: False
        replicas = dist.get_world_size(self.group) if self.group else 1
        own, tied = self.flat.gradients[: self.own], self.flat.gradients[self.own :]
        found = overflows(own, replicas) or overflows(tied, 1)
        flag = torch.tensor(found, dtype=torch.uint8, device=self.flat.device)
        asked = self._largest(flag, None) if dist.is_initialized() else None

        def answer() -> bool:
            if asked:
                asked.wait()
            return bool(flag)

        return answer

    @staticmethod
    def _largest(flags: Tensor, group: dist.ProcessGroup | None) -> dist.Work | None:
        return dist.all_reduce(flags, dist.ReduceOp.MAX, group=group, async_op=True)

    def _update(self, sums: GradientAllReduce | None, there: list[bool], skipped: bool) -> None:
        """Chunk by chunk, as soon as it has been summed; of a step that is skipped nothing, and that takes its time."""
        runs = [] if skipped else self._runs(there)
        summed = sums.done() if sums else None
        self.store.begin()
        for chunk in self.chunks:
            if summed and chunk.start < self.own:
                self.note(*next(summed))
            self.store.update(chunk, runs, self.scale)
        if not skipped:
            self.done = [done + own for done, own in zip(self.done, there, strict=True)]

    def _runs(self, there: list[bool]) -> list[Run]:
        """Return the ranges to update; neighbouring parameters with equal step counts are updated together."""
        found: list[Run] = []
        for place, own, done in zip(self.flat.places.values(), there, self.done, strict=True):
            if own and found and (found[-1].stop, found[-1].done) == (place.start, done):
                found[-1] = Run(found[-1].start, place.stop, done)
            elif own:
                found.append(Run(place.start, place.stop, done))
        return found

    def _judge(self, skipped: bool) -> None:
        if self.scaling is None:
            return
        self.scaling.judge(skipped)
        if skipped and is_first_rank():
            now = f"now it is {self.scale:g}" if self.scaling.fixed is None else "it is fixed"
            so_far = f"{self.scaling.skipped} skipped so far"
            print(f"{self.scaling.overflow} ({now}): no update on any rank, {so_far}", flush=True)

    def held(self) -> list[Tensor]:
        """Tensors that the device holds between steps."""
        return [self.flat.weights, self.flat.gradients, *self.store.held()]

    def weights(self) -> dict[str, Tensor]:
        """The parameters as a state has them: views of what the optimizer updates."""
        return self._read(self.store.master)

    def state(self) -> dict[str, Any]:
        """The optimizer's state by parameter, as `harness.runtime.training_state.optimizer_state` has it; views."""
        rows = {key: self._read(row) for key, row in zip(self.optimizer.rows, self.store.rows, strict=True)}
        found: dict[str, Any] = {}
        for name, done in zip(self.flat.places, self.done, strict=True):
            if done and rows:
                counter = {"step": torch.tensor(float(done))} if self.optimizer.counts else {}
                found[name] = counter | {key: values[name] for key, values in rows.items()}
        return found

    def _read(self, buffer: Tensor) -> dict[str, Tensor]:
        self.store.synchronize()
        return {name: place.of(buffer).detach() for name, place in self.flat.places.items()}

    def load(self, model: dict[str, Tensor], optimizer: dict[str, Any], scale: dict[str, float] | None = None) -> None:
        """The inverse of `weights` and `state`, from those of the whole model, and of `scaling.state`.

        Parameters without saved state start from scratch, as does a loss scale of which the state says nothing.
        """
        self.store.synchronize()
        if self.scaling:
            self.scaling.load(scale)
        for number, (name, place) in enumerate(self.flat.places.items()):
            place.of(self.store.master).copy_(model[name])
            saved = optimizer.get(name, {})
            for key, row in zip(self.optimizer.rows, self.store.rows, strict=True):
                place.of(row).copy_(saved[key]) if key in saved else place.of(row).zero_()
            self.done[number] = int(saved.get("step", 1)) if saved else 0
        if self.store.master is not self.flat.weights:
            self.flat.weights.copy_(self.store.master)
