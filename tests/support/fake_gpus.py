"""GPUs on a machine without any: tensors are on the CPU and say that they are on a GPU, streams are clocks.

    with fake_gpus() as order:
        GPipe(module, [2, 2], ["cuda:0", "cuda:1"], 4)(x)
    assert order.faults == []

Kernels run at once, in the order in which the host launches them; what a GPU could do in another order is a fault
(tests/support/stream_order.py). As on a GPU

* a kernel runs in the current stream of its tensors' device, a copy between devices in those of both ends;
* a copy from or to pageable memory, a number that is read (`item`, `float`) and `synchronize` make the host wait;
* memory belongs to the stream that was current when it was allocated, and goes back to it when the last tensor dies;
* a collective or message runs in a stream of its own after the current one, and `Work.wait` makes the current one wait.

tests/support/fake_cuda.py is less: it only records what streams and events are asked for, at times that a test sets.

Autograd's threads are not there: backward passes run in the streams of their caller's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Work
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from harness.launch import process_group
from tests.support import fake_libraries
from tests.support.fake_machine import (
    MACHINE,
    Event,
    Stream,
    block_of,
    current_stream,
    elsewhere,
    gpu_number,
    range_of,
    wait_for,
)
from tests.support.stream_order import HOST, StreamOrder

READ_BY_HOST = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero"}
"""Kernels whose result the host waits for."""
NO_KERNEL = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "record_stream", "set_"}


class _Generator(torch.Generator):
    """torch.Generator of any device."""

    def __new__(cls, device: Any = None) -> _Generator:
        return super().__new__(cls)


class _Devices(TorchFunctionMode):
    """Tensors that say that they are on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload):  # called by a mode, which goes on with what it has seen
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if name == "__get__" and owner in ("device", "is_cuda"):
            gpu = MACHINE.of(args[0])
            here = func(*args)
            return here if gpu is None else (True if owner == "is_cuda" else torch.device("cuda", gpu))
        if name == "get_device":
            return -1 if (gpu := MACHINE.of(args[0])) is None else gpu
        if name in ("tolist", "numpy") and (gpu := MACHINE.of(args[0])) is not None:
            MACHINE.host_waits(MACHINE.stream(gpu).name)
        if name in ("is_pinned", "pin_memory"):
            return _pinned(name, args[0])
        if name == "new_tensor" and "device" not in kwargs and (gpu := MACHINE.of(args[0])) is not None:
            kwargs["device"] = gpu
        if name in ("to", "cuda", "cpu"):
            return _moved(func, name, args, kwargs)
        return _made(func, args, kwargs)


def _pinned(name: str, tensor: Tensor) -> Any:
    if name == "is_pinned":
        return block_of(tensor) in MACHINE.pinned
    copy = tensor.clone()
    MACHINE.pinned.add(block_of(copy))
    return copy


def _made(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A function that may take a device, whose result is then on it."""
    wanted, pinned = kwargs.get("device"), kwargs.pop("pin_memory", False)
    if wanted is None or not _here(wanted) or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE):
        out = func(*args, **kwargs)
    else:
        with elsewhere(gpu_number(wanted)):
            out = func(*args, **(kwargs | {"device": "cpu"}))
    if pinned:
        MACHINE.pinned.add(block_of(out))
    return out


def _here(device: Any) -> bool:
    """Whether a device is the host or one of the GPUs: there are others, such as "meta"."""
    return isinstance(device, int) or torch.device(device).type in ("cpu", "cuda")


def _moved(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """`to`, `cuda`, `cpu`: a copy in the streams of both ends, where a tensor is not there yet."""
    tensor, dtype, flags = args[0], kwargs.get("dtype"), []
    wanted = {"cuda": f"cuda:{MACHINE.device}", "cpu": "cpu"}.get(name) or kwargs.get("device")
    for one in args[1:]:
        if isinstance(one, Tensor):
            other = MACHINE.of(one)
            wanted, dtype = "cpu" if other is None else f"cuda:{other}", one.dtype
        elif isinstance(one, torch.dtype):
            dtype = one
        elif isinstance(one, bool):
            flags.append(one)
        elif one is not None:
            wanted = one
    if wanted is not None and not _here(wanted):
        return func(*args, **kwargs)
    non_blocking, copied = (*flags, False, False)[:2]
    non_blocking, copied = kwargs.get("non_blocking", non_blocking), kwargs.get("copy", copied)
    cast = tensor if dtype in (None, tensor.dtype) else Tensor.to(tensor, dtype)
    here, there = MACHINE.of(tensor), gpu_number(wanted) if wanted is not None else MACHINE.of(tensor)
    if here == there:
        return cast.clone() if copied and cast is tensor else cast
    with elsewhere(there):
        out = torch.empty_like(cast)
    if not (torch.is_grad_enabled() and cast.requires_grad):
        return out.copy_(cast.detach(), non_blocking=non_blocking)
    raise NotImplementedError("a move that autograd follows")


class _Kernels(TorchDispatchMode):
    """Books what each kernel reads and writes, and in which stream."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace in ("aten", "prims"):
            with MACHINE.lock:
                _booked(func, args, kwargs, out)
        elif func.namespace == "c10d":
            with MACHINE.lock:
                _communicated(func._schema.name.partition("::")[2], args, out)
        return out


def _tensors(values: Any) -> list[Tensor]:
    """Those that have memory."""
    found = (one for one in tree_leaves(values) if isinstance(one, Tensor) and not isinstance(one, FakeTensor))
    return [one for one in found if one.numel() and one.device.type != "meta"]


def _booked(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    ins, outs = _tensors((args, kwargs)), _tensors(out)
    own = {block_of(one) for one in ins}
    name = func._schema.name.partition("::")[2]
    wanted = getattr(MACHINE.local, "gpu", None)
    places = [MACHINE.of(one) for one in ins if one.dim() or MACHINE.of(one) is not None]
    gpu = wanted[0] if wanted else next((place for place in places if place is not None), None)
    for number, one in enumerate(outs):
        MACHINE.allocated(one, MACHINE.of(ins[number]) if name.startswith("_foreach_") else gpu)
    if func.is_view or name in NO_KERNEL:
        return
    written = [one for one in outs if block_of(one) not in own]
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info and argument.alias_info.is_write:
            written += _tensors(value)
    if name == "copy_":
        _copied(args[0], args[1], bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking")))
        return
    different = {place for place in places if place is not None}
    if len(different) > 1 and not name.startswith("_foreach_"):
        MACHINE.order.faults.append(f"{name} has tensors of GPUs {sorted(different)}")
    if len(different) > 1 and name.startswith("_foreach_"):  # torch parts them by their GPUs
        for place in different:
            _launched(name, *([one for one in found if MACHINE.of(one) == place] for found in (ins, written)), place)
    else:
        _launched(name, ins, written, gpu)


def _launched(name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], gpu: int | None) -> None:
    stream = HOST if gpu is None else MACHINE.stream(gpu).name
    MACHINE.order.launch(stream, name, map(range_of, reads), map(range_of, writes))
    if gpu is not None and name in READ_BY_HOST:
        MACHINE.host_waits(stream)


def _copied(target: Tensor, source: Tensor, non_blocking: bool) -> None:
    order, ends = MACHINE.order, (MACHINE.of(source), MACHINE.of(target))
    streams = [MACHINE.stream(gpu).name for gpu in dict.fromkeys(ends) if gpu is not None]
    if not streams:
        order.launch(HOST, "copy_", [range_of(source)], [range_of(target)])
        return
    for stream in streams[1:]:
        order.join(streams[0], order.clock(stream))
    host = [one for one, gpu in ((source, ends[0]), (target, ends[1])) if gpu is None]
    pageable = bool(host) and block_of(host[0]) not in MACHINE.pinned
    if pageable and host[0] is source:
        order.launch(HOST, "copy_", [range_of(source)])
        order.launch(streams[0], "copy_", [], [range_of(target)])
    else:
        order.launch(streams[0], "copy_", [range_of(source)], [range_of(target)])
    for stream in streams[1:]:
        order.join(stream, order.clock(streams[0]))
    if host and (pageable or not non_blocking):
        MACHINE.host_waits(streams[0])
    elif host:  # torch gives pinned memory to nobody else before such a copy has ended
        order.record(block_of(host[0]), streams[0])


def _communicated(name: str, args: Any, out: Any) -> None:
    """A call of torch.distributed from the main thread."""
    group = next(ProcessGroup.unbox(one) for one in args if isinstance(one, torch.ScriptObject))
    works = [Work.unbox(one) for one in tree_leaves(out) if isinstance(one, torch.ScriptObject)]
    tensors = _tensors([one for one in args if not isinstance(one, torch.ScriptObject)])
    sent = tensors if name == "send" else tensors[1:] if name in ("_allgather_base_", "_reduce_scatter_base_") else ()
    _in_stream_of(group.group_name, name, tensors, [one for one in tensors if one not in set(sent)], works)


def _in_stream_of(
    group: str, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], works: Sequence[Work]
) -> None:
    gpu = next((place for place in map(MACHINE.of, reads) if place is not None), None)
    if gpu is None:
        MACHINE.order.launch(HOST, name, map(range_of, reads), map(range_of, writes))
        return
    stream = f"gpu {gpu}, group {group}"
    MACHINE.order.join(stream, MACHINE.order.clock(MACHINE.stream(gpu).name))
    MACHINE.order.launch(stream, name, map(range_of, reads), map(range_of, writes))
    MACHINE.works.update((id(work), (stream, work)) for work in works)
    if getattr(MACHINE.local, "waits", False):
        wait_for(stream)


def _message(method: Callable[..., Work], name: str) -> Callable[..., Work]:
    """`send` and `recv` of a group in another thread than the main one: modes of several threads can crash there."""

    def called(group: ProcessGroup, tensors: Any, peer: int, tag: int) -> Work:
        if threading.current_thread() is threading.main_thread():
            return method(group, tensors, peer, tag)
        with _disable_current_modes():
            work = method(group, tensors, peer, tag)
        with MACHINE.lock:
            _in_stream_of(group.group_name, name, tensors, tensors if name == "recv" else (), [work])
        return work

    return called


def _waited(method: Callable[..., Any]) -> Callable[..., Any]:
    def wait(work: Work, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():  # gloo copies some results there
            out = method(work, *args, **kwargs)
        if found := MACHINE.works.get(id(work)):
            with MACHINE.lock:
                wait_for(found[0])
        return out

    return wait


@contextmanager
def _stream(stream: Stream | None) -> Iterator[None]:
    """torch.cuda.stream."""
    if stream is None:
        yield
        return
    before = MACHINE.stream(stream.gpu)
    _set_stream(stream)
    try:
        yield
    finally:
        _set_stream(before)


def _set_stream(stream: Stream) -> None:
    MACHINE.stream(stream.gpu)
    MACHINE.local.streams[stream.gpu] = stream


def _backward(run: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass. `Tensor.backward` is itself a function that the mode sees, and is without it inside."""

    def watched_run(*args: Any, **kwargs: Any) -> Any:
        with nullcontext() if _get_current_function_mode_stack() else _Devices():
            out = run(*args, **kwargs)
        fake_libraries.reducer_ends()
        return out

    return watched_run


def _without_device(init: Callable[..., None]) -> Callable[..., None]:
    """gloo knows of no GPU."""

    def begun(*args: Any, device_id: Any = None, **kwargs: Any) -> None:
        init(*args, **kwargs)

    return begun


def _record_stream(tensor: Tensor, stream: Stream) -> None:
    MACHINE.order.record(block_of(tensor), stream.name)


def _synchronize(device: Any = None) -> None:
    gpu = MACHINE.device if device is None else gpu_number(device)
    for name in list(MACHINE.order.clocks):
        if name.split(",")[0] == f"gpu {gpu}":
            MACHINE.host_waits(name)


FAKES: dict[str, Any] = {
    "Stream": Stream,
    "Event": Event,
    "stream": _stream,
    "set_stream": _set_stream,
    "current_stream": current_stream,
    "default_stream": lambda device=None: Stream(device, name=f"gpu {current_stream(device).gpu}"),
    "synchronize": _synchronize,
    "current_device": lambda: MACHINE.device,
    "device": lambda device: nullcontext(),
    "device_count": lambda: 8,
    "set_device": lambda device: setattr(MACHINE, "device", gpu_number(device)),
    "empty_cache": lambda: None,
    "is_current_stream_capturing": lambda: False,
    "memory_allocated": lambda device=None: 0,
    "reset_peak_memory_stats": lambda device=None: None,
    "max_memory_allocated": lambda device=None: 0,
    "max_memory_reserved": lambda device=None: 0,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "manual_seed": torch.manual_seed,
}


@contextmanager
def watched() -> Iterator[None]:
    """This thread's tensors and kernels are watched."""
    with _Devices(), _Kernels():
        yield


@contextmanager
def fake_gpus() -> Iterator[StreamOrder]:
    """GPUs for this process, the ranks that it forks and their threads."""
    MACHINE.__init__()  # type: ignore[misc]
    run = threading.Thread.run

    def in_thread(thread: threading.Thread) -> None:
        with watched():
            run(thread)

    with pytest.MonkeyPatch.context() as patch:
        for name, fake in FAKES.items():
            patch.setattr(torch.cuda, name, fake)
        patch.setattr(torch, "Generator", _Generator)
        patch.setattr(torch.autograd, "_engine_run_backward", _backward(torch.autograd._engine_run_backward))
        patch.setattr(Tensor, "record_stream", _record_stream)
        patch.setattr(process_group, "ON_GPUS", "gloo")
        patch.setattr(dist, "init_process_group", _without_device(dist.init_process_group))
        options = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))
        patch.setattr(dist, "ProcessGroupNCCL", options, raising=False)  # gloo takes no notice of them
        patch.setattr(threading.Thread, "run", in_thread)
        patch.setattr(Work, "wait", _waited(Work.wait))
        fake_libraries.patch(patch)
        for method in "send", "recv":
            patch.setattr(ProcessGroup, method, _message(getattr(ProcessGroup, method), method))
        with watched():
            yield MACHINE.order
