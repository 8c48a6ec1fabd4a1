"""GPipe as a library: what a user of the class relies on."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import time

import pytest
import torch
from torch import Tensor, nn

from engines.gpipe.gpipe_module import GPipe
from harness.nn.skip import Stash, isolate
from tests.engines.networks import Recall, Split


def mlp(width: int = 4, layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).double()


def pipe(module: nn.Sequential, balance: list[int], chunks: int = 2, **options: object) -> GPipe:
    return GPipe(module, balance, ["cpu"] * len(balance), chunks, **options)  # type: ignore[arg-type]


def test_an_ordinary_backward_fills_the_gradients() -> None:
    plain, x = mlp(), torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    split = pipe(copy.deepcopy(plain), [1, 2, 1], chunks=3)
    ((plain(x) ** 2).mean()).backward()
    expected, x.grad = x.grad, None
    ((split(x) ** 2).mean()).backward()
    torch.testing.assert_close(x.grad, expected)
    for mine, theirs in zip(split.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_the_state_dict_is_that_of_the_sequential() -> None:
    plain = mlp()
    split = pipe(copy.deepcopy(plain), [2, 2])
    assert list(split.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(split.state_dict())


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_the_order_of_the_clock_and_of_the_backward_pass(checkpoint: str) -> None:
    split = pipe(mlp(), [2, 2], chunks=3, checkpoint=checkpoint)
    split(torch.randn(6, 4, dtype=torch.float64)).sum().backward()
    ran = [s.op for s in sorted(split.spans, key=lambda s: s.start_s) if s.device == 1 and s.queue == "compute"]
    assert (
        ran
        == {
            "never": ["1F0", "1F1", "1F2", "1B2", "1B1", "1B0"],
            "except_last": ["1F0", "1F1", "1F2", "1B2", "1R1", "1B1", "1R0", "1B0"],
            "always": ["1F0", "1F1", "1F2", "1R2", "1B2", "1R1", "1B1", "1R0", "1B0"],
        }[checkpoint]
    )


def test_without_the_dependency_a_recomputation_runs_once_its_gradient_is_there() -> None:
    split = pipe(mlp(), [2, 2], chunks=3, checkpoint="always", dependency=False)
    split(torch.randn(6, 4, dtype=torch.float64)).sum().backward()
    for device, backward in ((0, "R2 R1 B2 R0 B1 B0"), (1, "R2 R1 R0 B2 B1 B0")):
        ran = [s.op[1:] for s in sorted(split.spans, key=lambda s: s.start_s)
               if s.device == device and s.queue == "compute"]  # fmt: skip
        assert ran == ["F0", "F1", "F2", *backward.split()]


@pytest.mark.parametrize("stages, chunks", [(1, 4), (2, 4), (4, 3)])
def test_the_number_of_recomputed_tasks(stages: int, chunks: int) -> None:
    """n (m - 1): all but those of the last micro-batch."""
    split = pipe(mlp(), [4 // stages] * stages, chunks, checkpoint="except_last")
    split(torch.randn(12, 4, dtype=torch.float64)).sum().backward()
    assert sum(s.op[1] == "R" for s in split.spans) == stages * (chunks - 1)


def test_without_streams_a_copy_occupies_the_compute_queues_of_both_devices() -> None:
    split = pipe(mlp(), [2, 2], streams=False)
    split(torch.randn(4, 4, dtype=torch.float64)).sum().backward()
    copies = sorted((s.op, s.device, s.queue) for s in split.spans if "copy" in s.op)
    ops = ["0copy0<1", "0copy1<1", "1copy0<0", "1copy1<0"]
    assert copies == [(op, device, "compute") for op in ops for device in (0, 1)]
    held = {s.op: set() for s in split.spans if "copy" in s.op}
    for s in split.spans:
        if "copy" in s.op:
            held[s.op].add((s.start_s, s.end_s))
    assert all(len(times) == 1 for times in held.values()), "both queues are held for the same time"


class Sleep(nn.Module):
    """Takes its time, forward and backward, without the GIL."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Sleep.apply(x)
        return result


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        time.sleep(0.02)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        time.sleep(0.02)
        return gradient


@pytest.mark.parametrize("kind", ["F", "B"])
def test_stages_run_at_once_forward_and_backward(kind: str) -> None:
    layers = nn.Sequential(nn.Linear(2, 2), Sleep(), nn.Linear(2, 2), Sleep())
    split = pipe(layers, [2, 2], chunks=4, checkpoint="never")
    split(torch.randn(4, 2)).sum().backward()
    of = [[(s.start_s, s.end_s) for s in split.spans if s.device == d and s.op[1] == kind] for d in (0, 1)]
    overlap = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in of[0] for b in of[1])
    busy = sum(end - start for start, end in of[0])
    assert overlap > 0.4 * busy


def test_a_recomputation_overlaps_the_backward_pass_of_the_next_stage() -> None:
    """R(i, 0) needs no gradient: it runs while B(i, 1) does, not after the gradient has arrived."""
    layers = nn.Sequential(nn.Linear(2, 2), Sleep(), nn.Linear(2, 2), Sleep())
    split = pipe(layers, [2, 2], chunks=2, checkpoint="always")
    split(torch.randn(4, 2)).sum().backward()
    start = {s.op: s.start_s for s in split.spans}
    end = {s.op: s.end_s for s in split.spans}
    assert start["0R1"] < end["1B1"] < start["0B1"]


@pytest.mark.parametrize("streams", [True, False])
def test_plain_dropout_is_exact_under_recomputation_with_several_devices_at_work(streams: bool) -> None:
    """The same weights and draws with and without recomputation give the same gradients."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.Dropout(0.5)))).double()
    x = torch.randn(32, 64, dtype=torch.float64)
    gradients = []
    for checkpoint in ("never", "always"):
        split = pipe(copy.deepcopy(layers), [2, 2, 2, 2], chunks=8, checkpoint=checkpoint, streams=streams)
        for _ in range(2):  # the second step knows already which stages draw
            torch.manual_seed(5)
            split.zero_grad()
            output = split(x)
            output.sum().backward()
        assert 0.2 < (output == 0).double().mean() < 0.8
        gradients.append([p.grad.clone() for p in split.parameters()])
    for without, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, without, rtol=0, atol=0)


def test_a_stage_that_begins_to_draw_later_is_repeated_exactly() -> None:
    class Sometimes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.5) if x.min() > 0.5 else x

    torch.manual_seed(0)
    layers = nn.Sequential(Sometimes(), nn.Linear(16, 16), nn.Linear(16, 1)).double()
    x = torch.cat([torch.zeros(2, 16), torch.ones(2, 16)]).double()
    split = pipe(layers, [2, 1], checkpoint="always")
    found = []
    x.requires_grad_()
    output = split(x)
    output.sum().backward()
    assert x.grad is not None
    masks = x.grad[2:] != 0
    assert masks.any() and not masks.all()
    weight, bias = layers[1].weight.T @ layers[2].weight.T, layers[2](layers[1].bias)
    torch.testing.assert_close(output[2:], 2 * masks.double() @ weight + bias)
    x = x.detach()
    for checkpoint in ("always", "never"):
        split.checkpoint = checkpoint
        split.zero_grad()
        torch.manual_seed(1)
        split(x).sum().backward()
        found.append([p.grad.clone() for p in split.parameters()])
    for recomputed, without in zip(*found, strict=True):
        torch.testing.assert_close(recomputed, without, rtol=0, atol=0)


def test_autocast_is_restored_in_the_recomputation() -> None:
    seen: list[tuple[bool, torch.dtype, bool]] = []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            state = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
            seen.append((*state, torch.is_autocast_cache_enabled()))
            return x

    split = pipe(nn.Sequential(nn.Linear(2, 2), Look(), nn.Linear(2, 2)), [2, 1], checkpoint="always")
    for cache in (True, False):
        seen.clear()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            output = split(torch.randn(4, 2))
        output.float().sum().backward()
        assert output.dtype is torch.bfloat16
        assert seen == [(True, torch.bfloat16, cache)] * 4


def test_recomputation_does_not_update_running_statistics() -> None:
    norm = nn.BatchNorm1d(2)
    split = pipe(nn.Sequential(nn.Linear(2, 2), norm), [1, 1], chunks=4, checkpoint="always")
    split(torch.randn(8, 2)).sum().backward()
    assert int(norm.num_batches_tracked) == 4


def test_deferred_batch_norm_equals_the_unsplit_layer() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.BatchNorm2d(3)).double()
    split = pipe(copy.deepcopy(plain), [1], chunks=4, checkpoint="always", deferred_batch_norm=True)
    for _ in range(3):
        x = torch.randn(8, 3, 2, 2, dtype=torch.float64)
        plain(x)
        split(x).sum().backward()
    assert list(split.state_dict()) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(split.state_dict()[name], value)


def test_a_repeated_block_stashes_in_a_namespace_of_its_own() -> None:
    def block() -> nn.Sequential:
        return nn.Sequential(Stash("x"), nn.Linear(3, 3), Recall("x"))

    with pytest.raises(ValueError, match=r"layer '1' stashes 'x', which layer '0' stashes too"):
        pipe(nn.Sequential(*block()[:1], *block()), [2, 2])
    layers = nn.Sequential(*isolate(block(), "one"), *isolate(block(), "two")).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(pipe(layers, [1, 2, 2, 1])(x), layers(x))


@pytest.mark.parametrize(
    "layers, message",
    [
        ([Stash("x"), nn.Tanh()], "layer '0' stashes 'x', which no later layer pops"),
        ([nn.Tanh(), Recall("x")], "layer '1' pops 'x', which no earlier layer stashes"),
        ([Recall("x"), Stash("x")], "layer '0' pops 'x', which no earlier layer stashes"),
    ],
)
def test_skips_that_do_not_match_are_refused_when_the_pipeline_is_built(layers: list[nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipe(nn.Sequential(*layers), [1, 1])


def test_the_first_error_names_its_place_and_the_pipeline_stays_usable() -> None:
    class Fail(nn.Module):
        active = True
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.active and x.min() > 0.5:  # the third micro-batch
                raise KeyError("broken")
            return x

    fail = Fail()
    split = pipe(nn.Sequential(nn.Identity(), nn.Identity(), fail), [1, 2], chunks=4)
    x = torch.tensor([0.0, 0.0, 1.0, 0.0]).unsqueeze(1)
    with pytest.raises(KeyError, match="broken") as raised:
        split(x)
    assert raised.value.__notes__ == ["in stage 1, layer '2', micro-batch 2, forward"]
    assert fail.calls == 3, "the fourth micro-batch is not begun"
    fail.active = False
    torch.testing.assert_close(split(x), x)


class BackwardFails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x * 1

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        raise ArithmeticError("no gradient today")


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_an_error_in_the_backward_pass_names_its_layer(checkpoint: str) -> None:
    class Fail(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = BackwardFails.apply(x)
            return result

    split = pipe(nn.Sequential(nn.Linear(2, 2), Fail(), nn.Linear(2, 2)), [2, 1], checkpoint=checkpoint)
    with pytest.raises(ArithmeticError, match="no gradient today") as raised:
        split(torch.randn(4, 2)).sum().backward()
    assert "in stage 0, layer '1', micro-batch 1, backward" in raised.value.__notes__


def test_an_interrupt_leaves_no_work_over() -> None:
    gc.collect()  # in a finalizer the interrupt would be lost
    layers = nn.Sequential(nn.Linear(2, 2), Sleep(), nn.Linear(2, 2), Sleep())
    split = pipe(layers, [2, 2], chunks=16)

    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        split(torch.randn(16, 2))
        time.sleep(5)
    assert split(torch.randn(2, 2)).shape == (2, 2)


def test_inference_and_evaluation() -> None:
    plain = mlp().append(nn.Dropout(0.5))
    split = pipe(copy.deepcopy(plain), [2, 3])
    x = torch.randn(5, 4, dtype=torch.float64)
    plain.eval(), split.eval()
    with torch.no_grad():
        torch.testing.assert_close(split(x), plain(x))
    output = split(x)
    output.sum().backward()
    assert not [s for s in split.spans if s.op[1] == "R"], "nothing is recomputed outside training"


def test_tuples_in_and_out() -> None:
    split = pipe(nn.Sequential(nn.Identity(), Split()), [1, 1])
    first, second = split(torch.ones(4, 1))
    assert first.tolist() == [[1.0]] * 4 and second.tolist() == [[0.5]] * 4


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"balance": [2, 1]}, r"balance \[2, 1\] must be positive and sum up to the 4 layers, it sums up to 3"),
        ({"balance": [5, -1]}, "must be positive"),
        ({"chunks": 0}, "chunks is 0, must be at least 1"),
        ({"checkpoint": "sometimes"}, "checkpoint is 'sometimes', must be one of always, except_last, never"),
        ({"devices": ["cpu"]}, "stages need 2 devices, 1 are given"),
        ({"devices": ["cpu", "meta"]}, "devices must be all CPU or all CUDA, got cpu, meta"),
        ({"placement": [0]}, "placement names 1 devices for 2 stages"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, object], message: str) -> None:
    given = {"balance": [2, 2], "devices": ["cpu", "cpu"], **arguments}
    with pytest.raises(ValueError, match=message):
        GPipe(mlp(), **given)  # type: ignore[arg-type]


def test_layers_of_the_wrong_kind() -> None:
    with pytest.raises(TypeError, match=r"must be a plain nn\.Sequential, got Linear"):
        GPipe(nn.Linear(1, 1), [1], ["cpu"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the input of a pipeline must be a tensor or a tuple of tensors, got list"):
        pipe(mlp(), [2, 2])([1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"need samples .* got shapes \(\)"):
        pipe(mlp(), [2, 2])(torch.tensor(1.0))


def test_closing_ends_the_threads() -> None:
    before = set(threading.enumerate())
    split = pipe(mlp(), [2, 2])
    opened = set(threading.enumerate()) - before
    assert len(opened) == 4
    split.close()
    for thread in opened:
        thread.join(timeout=5)
    assert not any(thread.is_alive() for thread in opened)
