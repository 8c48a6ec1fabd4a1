"""GPipe as a library: an `nn.Sequential`, split over devices, called like any other module.

model = GPipe(nn.Sequential(a, b, c, d), balance=[2, 2], devices=["cpu", "cpu"], chunks=8)
loss = criterion(model(inputs), targets)
loss.backward()
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from engines.gpipe.cpu_autograd_graph import run_cpu_pass
from engines.gpipe.cpu_pipeline import CpuPass, DeviceQueues
from engines.gpipe.cuda_pipeline import CudaPass
from engines.gpipe.cuda_streams import Streams, copy_streams
from engines.gpipe.microbatch import scatter
from engines.gpipe.stage import Stage, Surroundings
from engines.gpipe.stage_layout import layout
from engines.gpipe.tied_copies import LayerAdoption, SharedParameter, TiedCopies
from harness.core.problem import ProblemError
from harness.core.shared_buffers import Home
from harness.core.trace import Span
from harness.nn import batchnorm, dropout, parametrization_cache
from harness.nn.shared_state import SharedState
from harness.nn.skip import frozen_prefix, named_layers
from harness.nn.tied import move_apart, renormed
from harness.runtime import output_check
from harness.runtime.cpu_streams import JobQueue
from harness.runtime.values import Value, check_value, mark_overlaps, tensors_of
from harness.schedule.builders.gpipe import RECOMPUTE

ATTRIBUTES = (
    "balance",
    "bytes_sent",
    "checkpoint",
    "chunks",
    "dependency",
    "devices",
    "queues",
    "layout",
    "passes",
    "placement",
    "recorder",
    "seed",
    "shared",
    "shared_state",
    "spans",
    "stages",
    "streams",
    "ties",
    "training",
)


class GPipe(nn.Module):
    """A pipeline over `module`'s layers (torchgpipe, section 3). Its parameters keep the names of the Sequential.

    `balance[j]` layers form stage j, on `devices[placement[j]]` (stage j on device j by default). CPU devices are
    worker threads, so ["cpu", "cpu"] are two of them; otherwise all devices are CUDA devices. A mini-batch is cut
    into at most `chunks` micro-batches along dimension 0; inputs and outputs are tensors or tuples of tensors, the
    output on the last stage's device. `checkpoint` says which micro-batches are recomputed. `dependency`, `streams`
    and `portals` switch off the three optimizations of the paper's section 4.1. Gradients arrive in the parameters'
    `.grad` by `backward()`. A parameter that layers on several devices share is copied to each of them; every copy gets
    the sum of all gradients, so an optimizer that has them all keeps them equal (a norm over `parameters()` counts each
    copy); `module` itself keeps its own. So is a shared buffer; ProblemError if a pass
    changes it, or other state that layers of several stages share, and for a shared embedding with max_norm.
    `torch.autograd.grad` and `backward(inputs=...)` are refused, as are second derivatives on CPU devices. Hooks of
    parameters run once for each micro-batch, as with accumulated gradients, on CPU devices in the device's thread: what
    needs a step's gradient belongs after `backward()`. Saved-tensor hooks that hold around the call reach every layer.
    Layers are found by number, as in the Sequential.

    A tensor that is in a tuple twice stays one tensor in the next stage; RuntimeError if a stage changes in place one
    of several that overlapped when they were made. A skip is a copy, which the layers between do not change.

    Layers may recompute by themselves (`torch.utils.checkpoint`): harness.nn.dropout draws the same masks again;
    RuntimeError on CPU devices for other random numbers inside, which would be others.

    Each task has a cache of its own for `torch.nn.utils.parametrize.cached`, which around the call has no effect.

    A recomputation sees the buffers and attributes of the layers as its first run saw them, and what objects hold that
    can be reached from them or from forward hooks. RuntimeError if it gives other outputs all the same (on CUDA devices
    in the next call), and if weights change before it or in it. It sees global variables as they are now, and Python's
    and NumPy's global random generators go on: gradients that depend on these, where outputs do not, need
    checkpoint="never".

    Raises ValueError or TypeError for arguments that don't fit together, naming them. An error in a layer reaches
    the caller as it was raised, with a note that says stage, layer and micro-batch; the module stays usable.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int],
        devices: Sequence[str | torch.device],
        chunks: int = 1,
        checkpoint: str = "except_last",
        placement: Sequence[int] | None = None,
        deferred_batch_norm: bool = False,
        dependency: bool = True,
        streams: bool = True,
        portals: bool = True,
    ) -> None:
        super().__init__()
        self.balance = tuple(balance)
        self.devices = tuple(map(torch.device, devices))
        self.placement = tuple(placement) if placement is not None else tuple(range(len(self.balance)))
        self.chunks, self.checkpoint, self.dependency, self.streams = chunks, checkpoint, dependency, streams
        _check(module, self)
        if deferred_batch_norm:
            module = batchnorm.deferred(module, chunks)
        dropout.number(module)
        self.layout = layout(named_layers(module), self.balance, self.placement, portals)
        self.stages = self._adopt(module)
        self.seed = torch.initial_seed() & 0x7FFF_FFFF_FFFF_FFFF
        self.passes = 0
        self.spans: list[Span] = []
        self.bytes_sent: dict[str, int] = {}
        self._draws: dict[bool, dict[int, bool]] = {True: {}, False: {}}
        self._kinds: set[Hashable] = set()
        self._anchor = torch.zeros((), requires_grad=True)
        self.queues = self._open_queues() if self.on_cpu else None
        self._copy_streams = copy_streams(self.devices) if self.streams else None

    @property
    def shared(self) -> list[SharedParameter]:
        """The parameters of which several devices have a copy."""
        return self.ties.shared

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict as every module does; if copies of one parameter have different values, the last one
        counts."""
        found = super().load_state_dict(state_dict, strict, assign)
        for shared in self.shared:
            shared.copy_last()
        return found

    @property
    def on_cpu(self) -> bool:
        return self.devices[0].type == "cpu"

    def forward(self, value: Value) -> Value:
        """The whole mini-batch -> the gathered output of the last stage."""
        output_check.raise_differences()
        check_value(value, "the input of a pipeline")
        chunks = scatter(value, self.chunks)
        for chunk in chunks:
            mark_overlaps(chunk)
        around = Surroundings.capture(self.seed, self.passes, self.devices[0].type)
        parametrization_cache.use(self.modules())
        grad = torch.is_grad_enabled() and self._wants_grad(value)
        mode = self.checkpoint if self.training else "never"
        if self.training:
            self.passes += 1
            batchnorm.begin(self, len(chunks))
        if self.queues is None:
            return self._run_cuda_pass(chunks, around, mode, grad)
        seed = int(torch.empty((), dtype=torch.int64).random_())
        kind = self._uncompiled(mode, grad, chunks)
        run = CpuPass(
            self.stages,
            self.layout,
            self.queues,
            around,
            mode,
            chunks,
            grad,
            self._draws[self.training],
            seed,
            self.shared,
            threading.Lock() if kind else None,
            self._frozen_prefix(value),
        )
        self.spans, self.bytes_sent = run.spans, run.bytes_sent
        try:
            with self.shared_state.unchanged(grad and mode != "never"):
                output = run_cpu_pass(run, value, self._anchor, self.dependency, self._trained())
            if kind:
                self._kinds.add(kind)
            return output
        except BaseException as error:
            run.abandon(error)
            raise

    def _run_cuda_pass(self, chunks: list[Value], around: Surroundings, mode: str, grad: bool) -> Value:
        streams = Streams(self.devices, self._copy_streams)
        run = CudaPass(
            self.stages,
            self.layout,
            streams,
            around,
            mode,
            grad,
            self.dependency,
            self.ties,
            self._trained(),
            self._frozen_prefix(chunks[0]),
        )
        self.bytes_sent, self.recorder = run.bytes_sent, run.recorder
        with self.shared_state.unchanged(grad and mode != "never"):
            return run.run(chunks)

    def _uncompiled(self, mode: str, grad: bool, chunks: list[Value]) -> Hashable:
        """The kind of a pass for which layers are still to be compiled (`Module.compile`); None if there is no such.

        Its tasks take turns: the compiler's settings belong to the process, and it guards them in forward passes alone.
        """
        if not any(module._compiled_call_impl for module in self.modules()):
            return None
        autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        tensors = (*(tensor for chunk in chunks for tensor in tensors_of(chunk)), *self.parameters())
        looked_at = ((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors)
        kind = (mode, grad, autocast, *looked_at)
        return None if kind in self._kinds else kind

    def _trained(self) -> list[nn.Parameter]:
        """The parameters that the outer graph shows autograd."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def __len__(self) -> int:
        return len(self._layers())

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._layers())

    def __getitem__(self, index: int) -> nn.Module:
        return self._layers()[index]

    def _layers(self) -> list[nn.Module]:
        return [layer for stage in self.stages for _, layer in stage.layers]

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Casts as every module does. Raises TypeError for a device."""
        kinds = {type(one) for one in (*args, *kwargs.values())} - {bool}
        if any(issubclass(kind, torch.device | Tensor | str | int) for kind in kinds):
            self._stay()
        return super().to(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Cast, as a module that has the pipeline in it does, too. Raises TypeError for a move."""
        for device in self.devices:
            probe = torch.empty(0, device=device)
            if fn(probe).device != probe.device:
                self._stay()
        return super()._apply(fn, recurse)

    def _stay(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            f"the layers stay on the devices {', '.join(map(str, self.devices))} -> another GPipe for others"
        )

    cuda = cpu = xpu = ipu = to_empty = _stay

    def close(self) -> None:
        """End the worker threads; a call of the module then raises RuntimeError."""
        self._finalizer()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles: everything but the threads, the streams and the last pass."""
        left_out = {"queues", "recorder", "_copy_streams", "_finalizer"}
        return {name: value for name, value in self.__dict__.items() if name not in left_out} | {"spans": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.queues = self._open_queues() if self.on_cpu else None
        self._copy_streams = copy_streams(self.devices) if self.streams else None

    def _wants_grad(self, value: Value) -> bool:
        return any(t.requires_grad for t in tensors_of(value)) or any(p.requires_grad for p in self.parameters())

    def _frozen_prefix(self, value: Value) -> int:
        """The layers that no gradient reaches: none where the caller wants one of the inputs."""
        if any(tensor.requires_grad for tensor in tensors_of(value)):
            return 0
        return frozen_prefix(pair for stage in self.stages for pair in stage.layers)

    def _adopt(self, module: nn.Sequential) -> list[Stage]:
        """Move the layers to their devices; register them under their own names."""
        children, adoption = named_layers(module), LayerAdoption(module)
        places = [p for count, p in zip(self.balance, self.placement, strict=True) for _ in range(count)]
        if problems := list(renormed(children, places)):
            raise ProblemError(*problems)
        stages, first = [], 0
        for number, (count, place) in enumerate(zip(self.balance, self.placement, strict=True)):
            own = [(name, adoption.layer(layer, number, place)) for name, layer in children[first : first + count]]
            stage = Stage(number, own, self.devices[place])
            for name, layer in own:
                self.add_module(name, layer)
            stages.append(stage)
            first += count
        adopted = [layer for stage in stages for _, layer in stage.layers]
        for stage in stages:
            stage.state = stage.state.without(_modules(other for other in stages if other is not stage))
        homes = [Home(stage.number, self.placement[stage.number]) for stage in stages for _ in stage.layers]
        self.shared_state = SharedState(children, homes, adopted)
        self.shared_state.refuse(self.shared_state.statistics)
        move_apart(adopted, [home.device for home in homes], dict(enumerate(self.devices)))
        self.ties = TiedCopies(adoption.shared())
        return stages

    def _open_queues(self) -> DeviceQueues:
        used = sorted(set(self.placement))
        compute = {device: JobQueue(device, "compute") for device in used}
        copy = {device: JobQueue(device, "copy in") for device in used} if self.streams else None
        queues = DeviceQueues(compute, copy)
        # A graph that outlives the module still needs its queues: they end with the last holder of `queues`.
        self._finalizer = weakref.finalize(queues, _close, queues.all())
        return queues


def _modules(stages: Iterable[Stage]) -> list[nn.Module]:
    return [module for stage in stages for _, layer in stage.layers for module in layer.modules()]


def _close(queues: list[JobQueue]) -> None:
    for queue in queues:
        queue.close()


def _check(module: nn.Sequential, pipe: GPipe) -> None:
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        raise TypeError(f"module must be a plain nn.Sequential, got {type(module).__name__}")
    if not len(module):
        raise ValueError("module has no layers, a pipeline needs at least 1")
    if sum(pipe.balance) != len(module) or min(pipe.balance, default=0) < 1:
        raise ValueError(
            f"balance {list(pipe.balance)} must be positive and sum up to the {len(module)} layers, "
            f"it sums up to {sum(pipe.balance)}"
        )
    if pipe.chunks < 1:
        raise ValueError(f"chunks is {pipe.chunks}, must be at least 1")
    if pipe.checkpoint not in RECOMPUTE:
        raise ValueError(f"checkpoint is {pipe.checkpoint!r}, must be one of {', '.join(RECOMPUTE)}")
    if len(pipe.placement) != len(pipe.balance):
        raise ValueError(f"placement names {len(pipe.placement)} devices for {len(pipe.balance)} stages")
    if max(pipe.placement) >= len(pipe.devices) or min(pipe.placement) < 0:
        raise ValueError(f"stages need {max(pipe.placement) + 1} devices, {len(pipe.devices)} are given")
    if len({device.type for device in pipe.devices}) != 1 or pipe.devices[0].type not in ("cpu", "cuda"):
        raise ValueError(f"devices must be all CPU or all CUDA, got {', '.join(map(str, pipe.devices))}")
    taken = [name for name, _ in named_layers(module) if name in ATTRIBUTES or hasattr(GPipe, name)]
    if taken:
        raise ValueError(f"layers must not be called {', '.join(map(repr, taken))}: GPipe has attributes of that name")
