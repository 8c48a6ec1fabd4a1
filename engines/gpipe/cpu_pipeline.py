"""The pipeline over CPU devices: what the devices' queues do, one slot of tensors for each task.

Autograd runs CPU work in the calling thread, so a graph that carried the tensors would run one stage at a time. Here
the outer graph (engines/gpipe/cpu_autograd_graph.py) only issues jobs. The tensors travel in slots; a task's own graph
is cut by detach and runs, forward and backward, on its device's queue.

    slot (i, j)    ins --stage--> outs        forward, on the compute queue; copies bring ins and take outs
                   grads_in <---- grads_out   backward, likewise
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from engines.gpipe.microbatch import Parts, all_tensors
from engines.gpipe.stage import Stage, Surroundings
from engines.gpipe.stage_layout import StageLayout
from engines.gpipe.task_rng import TaskRng, global_state
from engines.gpipe.tied_copies import SUMS, SharedParameter
from harness.core.op import Op, Queue
from harness.nn import dropout
from harness.runtime.autograd import differentiable, failing_layer, non_leaf
from harness.runtime.cpu_streams import Job, JobQueue, Run, nothing, submit_together
from harness.runtime.recomputation import Before
from harness.runtime.values import Form, Value, distinct, gradients, mapped, tensors_of
from harness.schedule.builders.gpipe import recomputed
from harness.schedule.transfers import Transfer

Edges = dict[str, tuple[GradientEdge | None, ...]]
Gradients = dict[str, tuple[Tensor | None, ...]]


@dataclass(eq=False)
class Slot:
    """The tensors of task (i, j), and the jobs that move them."""

    micro_batch: int
    stage: Stage
    recompute: bool
    ins: Parts = field(default_factory=dict)
    outs: Parts = field(default_factory=dict)
    leaves: Parts = field(default_factory=dict)
    edges: Edges = field(default_factory=dict)
    grads_out: Gradients = field(default_factory=dict)
    grads_in: Gradients = field(default_factory=dict)
    before: Before | None = None
    forward: Job | None = None
    backward: Job | None = None
    arrivals: list[Job] = field(default_factory=list)
    gradient_arrivals: list[Job] = field(default_factory=list)

    def clear(self) -> None:
        """Release the tensors."""
        self.ins, self.outs, self.leaves, self.edges, self.before = {}, {}, {}, {}, None
        self.grads_out, self.grads_in = {}, {}


@dataclass(frozen=True)
class DeviceQueues:
    """The queues of every device, by the plan's device number; `copy` is None without streams."""

    compute: dict[int, JobQueue]
    copy: dict[int, JobQueue] | None

    def all(self) -> list[JobQueue]:
        return [*self.compute.values(), *(self.copy or {}).values()]


class CpuPass(Run):
    """One forward pass of a mini-batch through the pipeline, and the backward pass that follows."""

    def __init__(
        self,
        stages: list[Stage],
        layout: StageLayout,
        queues: DeviceQueues,
        around: Surroundings,
        mode: str,
        micro_batches: list[Value],
        grad: bool,
        draws: dict[int, bool],
        seed: int,
        shared: Sequence[SharedParameter] = (),
        alone: AbstractContextManager[Any] | None = None,
        prefix: int = 0,
    ) -> None:
        """Tasks hold `alone` while they compute. The first `prefix` layers are frozen, and no gradient reaches them."""
        super().__init__()
        self.prefix = prefix
        self.shared = shared
        self.alone = alone or nullcontext()
        self.sums: list[Job] = []
        self.output_form = Form.of(None)
        self.backward_begun = False
        self.layout = layout
        self.queues = queues
        self.around = around
        self.grad = grad
        self.m, self.n = len(micro_batches), len(stages)
        self.draws = draws  # stage -> whether it draws random numbers, as far as that is known
        self.random_seed = seed
        self.bytes_sent = {"activations": 0, "gradients": 0, "skips": 0, "skip_gradients": 0}
        self.slots = {
            (i, j): Slot(i, stage, grad and recomputed(i, self.m, mode) and layout.goes_back(j, prefix))
            for i in range(self.m)
            for j, stage in enumerate(stages)
        }
        self.input_shapes = [[t.shape for t in tensors_of(value)] for value in micro_batches]
        for i, value in enumerate(micro_batches):
            self.slots[i, 0].ins[""] = value

    # -- issued by the host, in the order of the graph ------------------------------------------------------------

    def issue_forward(self, slot: Slot) -> None:
        op = Op(slot.stage.number, "F", slot.micro_batch)
        slot.forward = self._compute(op, slot.arrivals, lambda: self._forward(slot))
        slot.arrivals = []

    def issue_recompute(self, slot: Slot) -> None:
        self._compute(Op(slot.stage.number, "R", slot.micro_batch), [], lambda: self._recompute(slot))

    def issue_backward(self, slot: Slot) -> None:
        op = Op(slot.stage.number, "B", slot.micro_batch)
        slot.backward = self._compute(op, slot.gradient_arrivals, lambda: self._backward(slot))
        slot.gradient_arrivals = []

    def issue_copy(self, i: int, transfer: Transfer) -> None:
        source, target = self.slots[i, transfer.source], self.slots[i, transfer.target]
        op = Op(transfer.target, "copy", i, transfer.part, transfer.source, queue="copy in")
        target.arrivals.append(self._copy(op, source.forward, lambda: self._move(source, target, transfer.part)))

    def issue_gradient_copy(self, i: int, transfer: Transfer) -> None:
        if not self.layout.is_graded(transfer, self.prefix):
            return
        source, target = self.slots[i, transfer.source], self.slots[i, transfer.target]
        op = Op(transfer.source, "copy", i, transfer.part, transfer.target, queue="copy in")
        job = self._copy(op, target.backward, lambda: self._move_gradient(target, source, transfer.part))
        source.gradient_arrivals.append(job)

    def issue_sums(self) -> None:
        """Over the copies of each shared parameter, when the stages on their devices have done all backward tasks."""
        queue: Queue = "compute" if self.queues.copy is None else "copy in"
        queues = self.queues.copy or self.queues.compute
        for shared in self.shared:
            devices = [self.layout.devices[stage] for stage in shared.stages]
            after = [
                slot.backward
                for slot in self.slots.values()
                if slot.backward is not None and self.layout.devices[slot.stage.number] in devices
            ]
            places = [(queues[d], shared.op(stage, queue)) for d, stage in zip(devices, shared.stages, strict=True)]
            self.sums.append(submit_together(places, Job(self, partial(self._sum, shared), after=after)))

    def _compute(self, op: Op, after: list[Job], work: Callable[[], None]) -> Job:
        def computed() -> None:
            with self.alone:
                work()

        return self.queues.compute[self.layout.devices[op.stage]].submit(Job(self, computed, op, after))

    def _copy(self, op: Op, after: Job | None, work: Any) -> Job:
        assert after is not None and op.peer is not None
        source, target = self.layout.devices[op.peer], self.layout.devices[op.stage]
        job = Job(self, work, op, (after,))
        if self.queues.copy is None:
            return submit_together([(self.queues.compute[target], op), (self.queues.compute[source], op)], job)
        return self.queues.copy[target].submit(job)

    # -- executed by the queues ------------------------------------------------------------------------------------

    def _forward(self, slot: Slot) -> None:
        for transfer in self.layout.into(slot.stage.number, copied=False):
            slot.ins[transfer.part] = self.slots[slot.micro_batch, transfer.source].outs.pop(transfer.part)
        with slot.stage.annotating_errors("forward", slot.micro_batch):
            outs = self._first_run(slot) if slot.recompute else self._only_run(slot)
        slot.outs = {part: mapped(Tensor.detach, value) for part, value in outs.items()}
        if any(not self.layout.is_copied(transfer) for transfer in self.layout.out_of(slot.stage.number)):
            slot.outs = _apart(slot.outs)
        if not slot.recompute:
            slot.ins = {}

    def _only_run(self, slot: Slot) -> Parts:
        """Run a task that will not be recomputed. Where it draws unexpectedly, that was from the global generator; the
        stage's next tasks draw from streams of their own."""
        j = slot.stage.number
        state = None if self.draws.get(j, True) else global_state()
        with torch.set_grad_enabled(self.grad), self._drawing(slot):
            if self.grad:
                outs = self._with_graph(slot, slot.stage.run)
            else:
                outs = slot.stage.run(slot.ins, slot.micro_batch, self.around)
        if state is not None and not torch.equal(state, global_state()):
            self.draws[j] = True
        return outs

    def _first_run(self, slot: Slot) -> Parts:
        """Of a task that will be. Where it seems to draw unexpectedly, its outputs come from a second run, which draws
        from the task's own stream; if it was another thread that drew, they are the same."""
        j = slot.stage.number
        state = None if self.draws.get(j, True) else global_state()
        with torch.no_grad(), self._drawing(slot):
            outs, slot.before = slot.stage.run_kept(slot.ins, slot.micro_batch, self.around)
        if state is not None and not torch.equal(state, global_state()):
            self.draws[j] = True
            ins = {part: mapped(Tensor.clone, value) for part, value in slot.ins.items()}
            slot.before.outputs = None  # those of the second run count
            with torch.no_grad(), self._drawing(slot):
                outs = slot.stage.run_again(ins, slot.micro_batch, self.around, slot.before)
        return outs

    def _recompute(self, slot: Slot) -> None:
        with slot.stage.annotating_errors("recomputation", slot.micro_batch), torch.enable_grad(), self._drawing(slot):
            self._with_graph(slot, partial(slot.stage.run_again, before=slot.before))
        slot.ins, slot.before = {}, None

    def _with_graph(self, slot: Slot, run: Callable[[Parts, int, Surroundings], Parts]) -> Parts:
        """Keep where the task's own graph begins (leaves) and ends (edges)."""
        j = slot.stage.number
        graded = self.layout.graded_into(j, self.prefix)
        leaves = {
            part: mapped(partial(_leaf, is_input=not j, again=slot.recompute, graded=graded.get(part, True)), value)
            for part, value in slot.ins.items()
        }
        outs = run(_entering(leaves), slot.micro_batch, self.around)
        slot.leaves = {part: value for part, value in leaves.items() if graded.get(part, True)}
        slot.edges = {part: tuple(map(_edge, tensors_of(value))) for part, value in outs.items()}
        return outs

    @contextmanager
    def _drawing(self, slot: Slot) -> Iterator[None]:
        """The task's own stream of random numbers, for stages that draw any.

        The first task of a stage finds out whether it does; a stage that does not is spared the overhead.
        """
        j = slot.stage.number
        if not self.draws.get(j, True):
            yield
            return
        stream = TaskRng(hash((self.random_seed, j, slot.micro_batch)) & 0x7FFF_FFFF_FFFF_FFFF)
        with stream, dropout.redirected(stream.generator.manual_seed):
            yield
        self.draws.setdefault(j, stream.drew)

    def _backward(self, slot: Slot) -> None:
        for transfer in self.layout.out_of(slot.stage.number):
            if not self.layout.is_copied(transfer):
                target = self.slots[slot.micro_batch, transfer.target]
                slot.grads_out[transfer.part] = target.grads_in.pop(transfer.part, ())
        edges, arrived = [], []
        for part, grads in slot.grads_out.items():
            for edge, gradient in zip(slot.edges.get(part, ()), grads, strict=False):
                if edge is not None and gradient is not None:
                    edges.append(edge)
                    arrived.append(gradient)
        with slot.stage.annotating_errors("backward", slot.micro_batch):
            try:
                if edges:
                    torch.autograd.backward(edges, arrived)
            except Exception as error:
                if not isinstance(error, MemoryError | torch.OutOfMemoryError):
                    slot.stage.layer = self._failing_layer(slot)
                raise
        slot.grads_out, slot.edges = {}, {}
        slot.grads_in = {part: gradients(leaves) for part, leaves in slot.leaves.items()}
        slot.leaves = {}

    def _failing_layer(self, slot: Slot) -> str:
        """Do the forward task again, to see in which layer the backward pass fails. Where what arrived is not kept, as
        no gradient of it is needed, nobody knows."""
        if len(slot.leaves) < len(self.layout.graded_into(slot.stage.number, self.prefix)):
            return "unknown"
        ins = _entering(slot.leaves)

        def run_again() -> list[tuple[Tensor, Tensor | None]]:
            with torch.enable_grad(), self._drawing(slot):
                outs = slot.stage.run_again(ins, slot.micro_batch, self.around, None)
            return [
                pair
                for part, arrived in slot.grads_out.items()
                for pair in zip(tensors_of(outs[part]), arrived, strict=False)
            ]

        return failing_layer(slot.stage.layers, run_again, all_tensors(slot.leaves))

    def _move(self, source: Slot, target: Slot, part: str) -> None:
        value = source.outs.pop(part)
        target.ins[part] = mapped(Tensor.clone, value)
        self._count("skips" if part else "activations", distinct(value))

    def _move_gradient(self, source: Slot, target: Slot, part: str) -> None:
        found = source.grads_in.pop(part, ())
        target.grads_out[part] = tuple(None if g is None else g.clone() for g in found)
        self._count("skip_gradients" if part else "gradients", found)

    def _sum(self, shared: SharedParameter) -> None:
        size = shared.sum_gradients()
        with self.lock:
            self.bytes_sent[SUMS] = self.bytes_sent.get(SUMS, 0) + size

    def _count(self, kind: str, tensors: Sequence[Tensor | None]) -> None:
        size = sum(t.numel() * t.element_size() for t in tensors if t is not None)
        with self.lock:
            self.bytes_sent[kind] += size

    # -- the ends -------------------------------------------------------------------------------------------------

    def outputs(self) -> list[Value]:
        """Wait for the last stage; its outputs, one for each micro-batch."""
        last = [self.slots[i, self.n - 1] for i in range(self.m)]
        for slot in last:
            assert slot.forward is not None
            slot.forward.wait()
        self.raise_error()
        return [slot.outs.pop("") for slot in last]

    def abandon(self, error: BaseException) -> None:
        """Skip what is still queued, wait until the queues are through with it, and release all tensors.

        The error is not kept: its traceback holds this pass, which autograd's nodes hold, too, where the garbage
        collector does not look.
        """
        self.fail(error)
        try:
            for job in [queue.submit(Job(self, nothing, always=True)) for queue in self.queues.all()]:
                job.wait()
        finally:
            for slot in self.slots.values():
                slot.clear()
            self.slots.clear()
            self.sums.clear()
            self.error = RuntimeError("this pass of the pipeline has failed: call the pipeline again")

    def input_gradients(self) -> list[Tensor | None]:
        """The gradients of the model's inputs, gathered; zeros for micro-batches that have none."""
        slots = [self.slots[i, 0] for i in range(self.m)]
        gathered: list[Tensor | None] = []
        for place, shapes in enumerate(zip(*self.input_shapes, strict=True)):
            column = [slot.grads_in.get("", (None,) * (place + 1))[place] for slot in slots]
            like = next((gradient for gradient in column if gradient is not None), None)
            if like is None:
                gathered.append(None)
                continue
            filled = [like.new_zeros(s) if g is None else g for g, s in zip(column, shapes, strict=True)]
            gathered.append(torch.cat(filled))
        return gathered

    def join_queues(self) -> None:
        """Wait for every backward task and sum, then raise the first error if there was one."""
        for slot in self.slots.values():
            if slot.backward is not None:
                slot.backward.wait()
        for job in self.sums:
            job.wait()
        self.raise_error()


def _entering(leaves: Parts) -> Parts:
    """Return the input of the first layer."""
    return {part: mapped(non_leaf, value) for part, value in leaves.items()}


def _leaf(tensor: Tensor, is_input: bool, again: bool, graded: bool) -> Tensor:
    """Return the leaf at which a task's graph begins. The model's inputs get a gradient only if the caller wants it,
    other values if they are `graded`.

    Micro-batches are views of one tensor; `data` gives each a version counter of its own, for layers in place. Only the
    caller's own pass may change it: a recomputation (`again`) gets a copy.
    """
    if is_input:
        return (tensor.detach().clone() if again else tensor.data).requires_grad_(tensor.requires_grad)
    return tensor.detach().requires_grad_(graded and differentiable(tensor))


def _apart(outs: Parts) -> Parts:
    """The values with skips that share memory with the layers' value copied: the next stage may work in place."""
    taken = {t.untyped_storage().data_ptr() for t in tensors_of(outs[""])}

    def separate(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.untyped_storage().data_ptr() in taken else tensor

    return {part: mapped(separate, value) if part else value for part, value in outs.items()}


def _edge(tensor: Tensor) -> GradientEdge | None:
    return get_gradient_edge(tensor) if tensor.requires_grad else None
