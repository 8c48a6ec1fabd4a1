"""The pipeline over CPU devices: autograd orders zero-size tokens, the devices' lanes do the work.

Autograd runs CPU work in the calling thread, so a graph that carried the tensors would run one stage at a time. Here
its nodes only issue jobs: a node's forward submits the forward task, its backward submits the backward task. The
tensors travel in slots, one for each task; a task's own graph is cut by detach and runs on its device's lane.

    graph    Enter -> Task(0,0) -> Copy -> Task(0,1) -> Exit -> loss        (host; tokens)
    slots           | ins, outs |        | ins, outs |                      (lanes; tensors)

Exit waits for the outputs and hands in the loss gradient; Enter's backward joins all lanes, raises the first error
and returns the gradients of the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from engines.gpipe.dependency import fork, join
from engines.gpipe.layout import Layout
from engines.gpipe.microbatch import Parts, Value, gather, mapped, tensors_of
from engines.gpipe.random import TaskRandom
from engines.gpipe.stage import Stage, Surroundings
from harness.op import Op
from harness.schedule.gpipe import clock_cycles, recomputed
from harness.schedule.hops import Hop
from harness.workers import Job, Lane, Run, submit_to_both

Leaves = dict[str, tuple[Tensor, ...]]
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
    leaves: Leaves = field(default_factory=dict)
    edges: Edges = field(default_factory=dict)
    grads_out: Gradients = field(default_factory=dict)
    grads_in: Gradients = field(default_factory=dict)
    forward: Job | None = None
    backward: Job | None = None
    arrivals: list[Job] = field(default_factory=list)
    gradient_arrivals: list[Job] = field(default_factory=list)


@dataclass(frozen=True)
class Lanes:
    """The lanes of every device, by the plan's device number; `copy` is None without streams."""

    compute: dict[int, Lane]
    copy: dict[int, Lane] | None


class TokenPass(Run):
    """One forward pass of a mini-batch through the pipeline, and the backward pass that follows."""

    def __init__(self, stages: list[Stage], layout: Layout, lanes: Lanes, around: Surroundings, mode: str,
                 micro_batches: list[Value], grad: bool, draws: dict[int, bool], seed: int) -> None:  # fmt: skip
        super().__init__()
        self.output_is_tuple = False
        self.layout = layout
        self.lanes = lanes
        self.around = around
        self.grad = grad
        self.m, self.n = len(micro_batches), len(stages)
        self.draws = draws  # stage -> whether it draws random numbers, as far as that is known
        self.random_seed = seed
        self.bytes_sent = {"activations": 0, "gradients": 0, "skips": 0, "skip_gradients": 0}
        self.slots = {
            (i, j): Slot(i, stage, grad and recomputed(i, self.m, mode))
            for i in range(self.m)
            for j, stage in enumerate(stages)
        }
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

    def issue_copy(self, i: int, hop: Hop) -> None:
        source, target = self.slots[i, hop.source], self.slots[i, hop.target]
        op = Op(hop.target, "copy", i, hop.part, hop.source, queue="copy in")
        target.arrivals.append(self._copy(op, source.forward, lambda: self._move(source, target, hop.part)))

    def issue_gradient_copy(self, i: int, hop: Hop) -> None:
        source, target = self.slots[i, hop.source], self.slots[i, hop.target]
        op = Op(hop.source, "copy", i, hop.part, hop.target, queue="copy in")
        job = self._copy(op, target.backward, lambda: self._move_gradient(target, source, hop.part))
        source.gradient_arrivals.append(job)

    def _compute(self, op: Op, after: list[Job], work: Any) -> Job:
        return self.lanes.compute[self.layout.devices[op.stage]].submit(Job(self, work, op, after))

    def _copy(self, op: Op, after: Job | None, work: Any) -> Job:
        assert after is not None and op.peer is not None
        source, target = self.layout.devices[op.peer], self.layout.devices[op.stage]
        job = Job(self, work, op, (after,))
        if self.lanes.copy is None:
            return submit_to_both(self.lanes.compute[source], self.lanes.compute[target], job)
        return self.lanes.copy[target].submit(job)

    # -- executed by the lanes ------------------------------------------------------------------------------------

    def _forward(self, slot: Slot) -> None:
        for hop in self.layout.into(slot.stage.number, copied=False):
            slot.ins[hop.part] = self.slots[slot.micro_batch, hop.source].outs.pop(hop.part)
        graph = self.grad and not slot.recompute
        with slot.stage.noted("forward", slot.micro_batch), torch.set_grad_enabled(graph):
            outs = self._run(slot, graph, again=False)
        slot.outs = {part: mapped(Tensor.detach, value) for part, value in outs.items()}
        if not slot.recompute:
            slot.ins = {}

    def _recompute(self, slot: Slot) -> None:
        with slot.stage.noted("recomputation", slot.micro_batch), torch.enable_grad():
            self._run(slot, graph=True, again=True)
        slot.ins = {}

    def _run(self, slot: Slot, graph: bool, again: bool) -> Parts:
        """Run the stage; with `graph` keep where its own graph begins (leaves) and ends (edges)."""
        ins = slot.ins
        if graph:
            first = slot.stage.number == 0
            slot.leaves = {part: tuple(_leaf(t, first) for t in tensors_of(value)) for part, value in ins.items()}
            ins = {p: ts if isinstance(ins[p], tuple) else ts[0] for p, ts in slot.leaves.items()}
        run = slot.stage.run_again if again else slot.stage.run
        with _random(self, slot):
            outs = run(ins, slot.micro_batch, self.around)
        if graph:
            slot.edges = {part: tuple(map(_edge, tensors_of(value))) for part, value in outs.items()}
        return outs

    def _backward(self, slot: Slot) -> None:
        for hop in self.layout.out_of(slot.stage.number):
            if not self.layout.is_copied(hop):
                target = self.slots[slot.micro_batch, hop.target]
                slot.grads_out[hop.part] = target.grads_in.pop(hop.part, ())
        edges, gradients = [], []
        for part, grads in slot.grads_out.items():
            for edge, gradient in zip(slot.edges.get(part, ()), grads, strict=False):
                if edge is not None and gradient is not None:
                    edges.append(edge)
                    gradients.append(gradient)
        slot.grads_out, slot.edges = {}, {}
        with slot.stage.noted("backward", slot.micro_batch):
            if edges:
                torch.autograd.backward(edges, gradients)
        slot.grads_in = {part: tuple(t.grad for t in leaves) for part, leaves in slot.leaves.items()}
        slot.leaves = {}

    def _move(self, source: Slot, target: Slot, part: str) -> None:
        value = source.outs.pop(part)
        target.ins[part] = mapped(Tensor.clone, value)
        self._count("skips" if part else "activations", tensors_of(value))

    def _move_gradient(self, source: Slot, target: Slot, part: str) -> None:
        gradients = source.grads_in.pop(part, ())
        target.grads_out[part] = tuple(None if g is None else g.clone() for g in gradients)
        self._count("skip_gradients" if part else "gradients", gradients)

    def _count(self, kind: str, tensors: tuple[Tensor | None, ...]) -> None:
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

    def join_lanes(self) -> None:
        """Wait for every backward task, then raise the first error if there was one."""
        for slot in self.slots.values():
            if slot.backward is not None:
                slot.backward.wait()
        self.raise_error()


def _leaf(tensor: Tensor, is_input: bool) -> Tensor:
    """Where a task's graph begins. The model's own inputs get a gradient only if the caller wants it."""
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_(tensor.requires_grad if is_input else differentiable)


def _edge(tensor: Tensor) -> GradientEdge | None:
    return get_gradient_edge(tensor) if tensor.requires_grad else None


class _random:
    """The task's own stream of random numbers, for stages that draw any.

    The first task of a stage finds out whether it does; a stage that does not is spared the overhead.
    """

    def __init__(self, run: TokenPass, slot: Slot) -> None:
        self.run, self.stage = run, slot.stage.number
        active = run.draws.get(self.stage, True)
        seed = hash((run.random_seed, self.stage, slot.micro_batch)) & 0x7FFF_FFFF_FFFF_FFFF
        self.mode = TaskRandom(seed) if active else None

    def __enter__(self) -> None:
        if self.mode is not None:
            self.mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.mode is not None:
            self.mode.__exit__(*error)
            self.run.draws.setdefault(self.stage, self.mode.drew)


class Enter(Function):
    """The inputs -> a token for each micro-batch; backward joins the lanes and returns the inputs' gradients."""

    @staticmethod
    def forward(ctx: Any, run: TokenPass, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        ctx.run = run
        return tuple(torch.empty(0) for _ in range(run.m))

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        run: TokenPass = ctx.run
        run.join_lanes()
        columns = zip(*(run.slots[i, 0].grads_in[""] for i in range(run.m)), strict=True)
        gradients = [None if column[0] is None else torch.cat(column) for column in columns]  # type: ignore[arg-type]
        return None, None, *gradients


class Task(Function):
    """Forward issues the forward task, backward the backward task. With recomputation this is Checkpoint."""

    @staticmethod
    def forward(ctx: Any, run: TokenPass, slot: Slot, token: Tensor) -> Tensor:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        ctx.run, ctx.slot = run, slot
        run.issue_forward(slot)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.run.issue_backward(ctx.slot)
        return None, None, None


class Recompute(Function):
    """Backward issues the recomputation into the slot that it shares with Task; it needs no gradient."""

    @staticmethod
    def forward(ctx: Any, run: TokenPass, slot: Slot, phony: Tensor) -> Tensor:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        ctx.run, ctx.slot = run, slot
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.run.issue_recompute(ctx.slot)
        return None, None, None


class Copy(Function):
    """Forward issues the copy of a value to the next stage, backward that of its gradient."""

    @staticmethod
    def forward(ctx: Any, run: TokenPass, i: int, hop: Hop, token: Tensor) -> Tensor:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        ctx.run, ctx.i, ctx.hop = run, i, hop
        run.issue_copy(i, hop)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[None, None, None, None]:  # type: ignore[override]
        ctx.run.issue_gradient_copy(ctx.i, ctx.hop)
        return None, None, None, None


class Exit(Function):
    """Tokens -> the gathered outputs, once they are there; backward hands the loss gradient to the last stage."""

    @staticmethod
    def forward(ctx: Any, run: TokenPass, *tokens: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        outputs = run.outputs()
        ctx.run, ctx.tokens = run, len(tokens)
        ctx.sizes = [tensors_of(value)[0].size(0) for value in outputs]
        gathered = gather(outputs)
        run.output_is_tuple = isinstance(gathered, tuple)
        result = tensors_of(gathered)
        ctx.mark_non_differentiable(*(t for t in result if not t.is_floating_point()))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        run: TokenPass = ctx.run
        pieces = [None if g is None else g.split(ctx.sizes) for g in gradients]
        for i in range(run.m):
            run.slots[i, run.n - 1].grads_out[""] = tuple(None if p is None else p[i] for p in pieces)
        return None, *(torch.empty(0) for _ in range(ctx.tokens))


def run_tokens(run: TokenPass, value: Value, anchor: Tensor, dependency: bool) -> Value:
    """Issue the whole forward pass in clock-cycles and return the gathered output (torchgpipe, section 3.2)."""
    if not run.grad:
        return _run_without_graph(run)
    graph = _Graph(run, list(Enter.apply(run, anchor, *tensors_of(value))), dependency)
    for cycle in clock_cycles(run.m, run.n):
        for i, j in cycle:
            graph.fence(i, j)
        for i, j in cycle:
            graph.compute(i, j)
    outputs: tuple[Tensor, ...] = Exit.apply(run, *graph.exits())
    return outputs if run.output_is_tuple else outputs[0]


def _run_without_graph(run: TokenPass) -> Value:
    for cycle in clock_cycles(run.m, run.n):
        for i, j in cycle:
            for hop in run.layout.into(j, copied=True):
                run.issue_copy(i, hop)
        for i, j in cycle:
            run.issue_forward(run.slots[i, j])
    return gather(run.outputs())


class _Graph:
    """The outer graph while it is built: a token for each micro-batch, one for each value that waits for its stage.

        token (i, j-1) --Copy--> join --> Task(i, j) --> fork --> ...
                                  ^                       |
              phony of (i-1, j) --'   (dependency)        '--> [Recompute] --> phony for (i+1, j)
    """

    def __init__(self, run: TokenPass, tokens: list[Tensor], dependency: bool) -> None:
        self.run = run
        self.tokens = tokens
        self.dependency = dependency
        self.before: dict[int, Tensor] = {}  # stage -> what its next micro-batch has to wait for
        self.waiting: dict[tuple[int, Hop], Tensor] = {}  # values that left their stage
        self.late: list[tuple[Slot, Tensor]] = []  # recomputations that nothing ties to a place

    def fence(self, i: int, j: int) -> None:
        """Issue the copies that task (i, j) needs."""
        for hop in self.run.layout.into(j, copied=True):
            self.waiting[i, hop] = Copy.apply(self.run, i, hop, self.waiting[i, hop])

    def compute(self, i: int, j: int) -> None:
        run, slot = self.run, self.run.slots[i, j]
        token = self.tokens[i]
        for hop in [h for h in run.layout.hops if h.target == j]:
            token = join(token, self.waiting.pop((i, hop)))
        if j in self.before:
            token = join(token, self.before.pop(j))
        token = Task.apply(run, slot, token)
        token, phony = fork(token)
        self._order(slot, phony)
        for hop in run.layout.out_of(j):
            token, self.waiting[i, hop] = fork(token)
        self.tokens[i] = token

    def _order(self, slot: Slot, phony: Tensor) -> None:
        if slot.recompute and not self.dependency:
            self.late.append((slot, phony))
        elif slot.recompute:
            self.before[slot.stage.number] = Recompute.apply(self.run, slot, phony)
        elif self.dependency:
            self.before[slot.stage.number] = phony

    def exits(self) -> list[Tensor]:
        """The tokens that Exit takes; recomputations that are still loose hang on it."""
        loose = list(self.before.values())
        loose += [Recompute.apply(self.run, slot, phony) for slot, phony in self.late]
        return [*self.tokens, *loose]
