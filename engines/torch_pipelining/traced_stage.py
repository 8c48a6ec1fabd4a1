"""A stage as torch.distributed.pipelining runs it, which says what it does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from harness.core.op import Kind, Op
from harness.runtime.boundary_shapes import Boundary
from harness.runtime.distributed_session import DistributedSession
from harness.runtime.session import place
from harness.runtime.stage_module import StageModule


class TracedStage(PipelineStage):
    """Notes its tasks in the session, and counts what it sends to other devices; received shapes are `entering`."""

    def __init__(
        self,
        session: DistributedSession,
        module: StageModule,
        entering: Boundary,
        leaving: Boundary,
        group: dist.ProcessGroup,
    ) -> None:
        stages = session.plan.stages
        super().__init__(
            module, module.number, len(stages), session.device, input_args=entering, output_args=leaving, group=group
        )
        self.session, self.module = session, module
        self.delayed: dict[int, tuple[Any, bool]] = {}
        """The losses of micro-batches whose backward pass is all in the half for the weights."""
        self.forward_bytes: dict[str, int] = {}
        self.backward_bytes: dict[str, int] = {}
        number, place = module.number, session.pipeline_rank
        if number + 1 < len(stages) and stages[number + 1].device != place:
            own = len(leaving) - len(module.leaving)
            self.forward_bytes = {"activations": _bytes(leaving[:own]), "skips": _bytes(leaving[own:])}
        if number > 0 and stages[number - 1].device != place:
            own = len(entering) - len(module.arriving)
            back = [[tensor for tensor in part if tensor.requires_grad] for part in (entering[:own], entering[own:])]
            self.backward_bytes = {"gradients": _bytes(back[0]), "skip_gradients": _bytes(back[1])}

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        session = self.session
        self.module.at(session.spec.seed, session.steps, session.global_micro_batch(fwd_chunk_id))
        with self._task("F", fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        session.bytes_sent.update(self.forward_bytes)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self._task("B", bwd_chunk_id):
            if full_backward or "" not in self.module.ungraded_in:
                super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            else:  # torch finds no weights where no input has a gradient, but in the first stage
                self.delayed[bwd_chunk_id] = loss, last_backward
                self.bwd_cache[bwd_chunk_id] = (None,) * len(self.args_recv_info[bwd_chunk_id])
        self.session.bytes_sent.update(self.backward_bytes)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self._task("W", bwd_chunk_id):
            if bwd_chunk_id not in self.delayed:
                super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
                return
            loss, last_backward = self.delayed.pop(bwd_chunk_id)
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward=True, last_backward=last_backward)
            self.bwd_cache.pop(bwd_chunk_id)

    @contextmanager
    def _task(self, kind: Kind, i: int) -> Iterator[None]:
        """Note the op. An error is reported as what it was, not as the RuntimeError that the library makes of it."""
        start = self.session.now()
        with self.session.phase(place(kind, self.session.global_micro_batch(i)), stage=self.module.number):
            try:
                yield
            except RuntimeError as error:
                raise (error.__cause__ or error) from None
        self.session.record(Op(self.module.number, kind, i), start, self.session.now())

    def buffers(self) -> list[Tensor]:
        """Return the receive buffers of messages; they are reused in every step."""
        infos = (info for table in (self.args_recv_info, self.grad_recv_info) for row in table.values() for info in row)
        found = [getattr(info, "buffer", None) for info in infos]
        return [buffer for buffer in found if buffer is not None]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
