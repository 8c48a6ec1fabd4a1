"""A profile from a trace of torch.profiler: of real training steps on the CPU, and of a GPU's events."""

from __future__ import annotations

import gzip
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity
from torch.utils.checkpoint import checkpoint

from harness import annotate
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.problem import CannotRun
from harness.measure.torch_trace import NODE, PREFIX, timed

pytestmark = pytest.mark.usefixtures("computation")


SLEPT: dict[tuple[str, float], list[float]] = defaultdict(list)
"""How long each pass of a trace really took: on a busy machine longer than it was to."""


def sleep(direction: str, seconds: float) -> None:
    start = time.perf_counter()
    time.sleep(seconds)
    SLEPT[direction, seconds].append(time.perf_counter() - start)


class Slow(torch.autograd.Function):
    """Takes so many seconds forward, and others backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.seconds = backward_s
        sleep("forward", forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        sleep("backward", ctx.seconds)
        return gradients[0], None, None


class Layer(nn.Module):
    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seconds = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Slow.apply(self.linear(x), *self.seconds)
        return result


class Net(nn.Module):
    """Three layers, the second of which takes longest."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Layer(0.01, 0.02), Layer(0.02, 0.01)
        self.blocks = nn.ModuleList([Layer(0.03, 0.05)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.last(torch.relu(self.blocks[0](self.first(x)))))


NAMES = ("first", "blocks_0", "last")
FORWARD, BACKWARD = (0.01, 0.03, 0.02), (0.02, 0.05, 0.01)


def profile(*names: str) -> ModelProfile:
    return ModelProfile(tuple(LayerProfile(name, param_bytes=80) for name in names), "net", 2)


def trace(folder: Path, model: nn.Module, step: Callable[[Tensor], Tensor], name: str = "trace.json") -> Path:
    remove = annotate(model)
    step(torch.randn(2, 4)).sum().backward()  # what is loaded at the first call is no layer's time
    SLEPT.clear()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            step(torch.randn(2, 4)).sum().backward()
    remove()
    step(torch.randn(2, 4))
    profiler.export_chrome_trace(str(folder / name))
    return folder / name


def check(found: ModelProfile) -> None:
    forward = [statistics.median(SLEPT["forward", seconds]) for seconds in FORWARD]
    backward = [statistics.median(SLEPT["backward", seconds]) for seconds in BACKWARD]
    assert [layer.forward_s for layer in found.layers] == pytest.approx(forward, abs=8e-3)
    assert [layer.backward_s for layer in found.layers] == pytest.approx(backward, abs=8e-3)
    assert found.times == "measured" and "3 forward and backward passes" in found.source
    assert [layer.param_bytes for layer in found.layers] == [80] * 3, "all else is as counted"


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_layers_have_the_times_of_the_trace(name: str, tmp_path: Path) -> None:
    model = Net()
    check(timed(profile(*NAMES), trace(tmp_path, model, model, name)))


def test_a_recomputed_layer_counts_once(tmp_path: Path) -> None:
    model = Net()

    def step(x: Tensor) -> Tensor:
        hidden = checkpoint(model.blocks[0], model.first(x), use_reentrant=False)
        return torch.as_tensor(model.last(torch.relu(torch.as_tensor(hidden))))

    check(timed(profile(*NAMES), trace(tmp_path, model, step)))


@pytest.mark.parametrize("prefix", ["body_", ""])
def test_the_model_may_be_a_part_of_the_traced_one_or_have_it_as_a_part(prefix: str, tmp_path: Path) -> None:
    model = Net()
    whole = nn.ModuleDict({"module": model})
    path = trace(tmp_path, model if prefix else whole, model)
    check(timed(profile(*(prefix + name for name in NAMES)), path))


def test_marks_can_be_removed(tmp_path: Path) -> None:
    model = Net()
    annotate(model)()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def event(name: str, start: float, length: float, kind: str = "cpu_op", thread: int = 1, **arguments: Any) -> Any:
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "ts": start,
        "dur": length,
        "pid": 1,
        "tid": thread,
        "args": arguments,
    }


def launched(number: int, start: float, length: float, thread: int = 1) -> list[Any]:
    """A kernel, long after it was launched."""
    return [
        event("cudaLaunchKernel", start, 1, "cuda_runtime", thread, correlation=number),
        event("gemm", start + 5000, length, "kernel", 7, correlation=number),
    ]


def flow(number: int, origin: float, node: float) -> list[Any]:
    start = {"ph": "s", "id": number, "cat": "fwdbwd", "ts": origin, "pid": 1, "tid": 1}
    return [start, {"ph": "f", "id": number, "cat": "fwdbwd", "ts": node, "pid": 1, "tid": 2}]


GPU = [
    event(f"{PREFIX}a", 0, 10, "user_annotation"), *launched(1, 2, 100), *launched(2, 12, 50),
    event(f"{PREFIX}b", 20, 10, "user_annotation"), *launched(3, 22, 300), *launched(4, 40, 9999),
    event(f"{NODE}LossBackward", 100, 5, thread=2), *launched(5, 101, 9999, 2),
    event(f"{NODE}BBackward", 110, 10, thread=2), *flow(1, 25, 112), *launched(6, 112, 600, 2),
    event(f"{PREFIX}b", 113, 4, "user_annotation", 2), *launched(7, 114, 300, 2),
    event(f"{NODE}AccumulateGrad", 121, 3, thread=2), *launched(8, 122, 25, 2),
    event(f"{NODE}ABackward", 130, 10, thread=2), *flow(2, 3, 131), *launched(9, 132, 200, 2),
]  # fmt: skip
"""Two layers: 150 and 300 us forward, 200 and 625 backward; a loss, and a recomputation in b's node."""


def written(folder: Path, events: Any, **more: Any) -> Path:
    path = folder / "t.json"
    path.write_text(json.dumps({"traceEvents": events, **more}))
    return path


def test_on_a_gpu_the_kernels_count(tmp_path: Path) -> None:
    path = written(tmp_path, GPU, deviceProperties=[{"name": "NVIDIA H100 80GB HBM3"}])
    found = timed(profile("a", "b"), path)
    assert [(one.forward_s, one.backward_s) for one in found.layers] == [
        (pytest.approx(150e-6), pytest.approx(200e-6)),
        (pytest.approx(300e-6), pytest.approx(625e-6)),
    ]
    assert found.source == "torch.profiler, t.json: NVIDIA H100 80GB HBM3, 1 forward and backward passes"


def test_a_pass_that_is_cut_off_does_not_count(tmp_path: Path) -> None:
    later = event(f"{PREFIX}a", 200, 10, "user_annotation")
    found = timed(profile("a", "b"), written(tmp_path, [*GPU, later, *launched(10, 201, 7777)]))
    assert found.layers[0].forward_s == pytest.approx(150e-6)


@pytest.mark.parametrize(
    ("events", "layers", "message"),
    [
        (None, "a", "traceEvents"),
        ([], "a", "from harness import annotate"),
        ([3, {}, {"ph": "X"}, {"ph": "X", "ts": "x", "dur": 1}], "a", "from harness import annotate"),
        (GPU, "a b missing", "has no range of layer missing"),
        (GPU, "b a", "one after the other"),
        (GPU[:5], "a", "has no backward pass"),
    ],
)
def test_what_is_no_trace_of_these_layers(events: Any, layers: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match=message) as raised:
        timed(profile(*layers.split()), written(tmp_path, events))
    assert [problem.key for problem in raised.value.problems] == ["trace"]


@pytest.mark.parametrize("data", [b"", b"{", b"\x1f\x8bx", gzip.compress(b"[1]"), b"\xff\xfe"], ids=range(5))
def test_a_damaged_file_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(data)
    with pytest.raises(CannotRun, match="trace"):
        timed(profile("a"), tmp_path / "t.json")
