"""GPipe in the corners: what goes wrong only now and then, or only for one model in a hundred."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import time
import weakref

import pytest
import torch
from torch import Tensor, nn

from engines.gpipe.gpipe_module import GPipe
from harness.core.op import Op
from harness.nn.dropout import Dropout
from harness.nn.skip import Stash
from harness.runtime.cpu_streams import Job, JobQueue, Run
from tests.engines.networks import Recall


def mlp(width: int = 4, layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).double()


def pipe(module: nn.Sequential, balance: list[int], chunks: int = 2, **options: object) -> GPipe:
    return GPipe(module, balance, ["cpu"] * len(balance), chunks, **options)  # type: ignore[arg-type]


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0)


def test_a_skip_is_not_changed_by_the_next_stage_on_the_same_device() -> None:
    """The stashed tensor is also the stage's output, and the copy queue reads it while the next stage writes."""
    for _ in range(10):
        layers = nn.Sequential(nn.Identity(), Stash("a"), InPlace(), Recall("a"))
        split = GPipe(layers, [2, 1, 1], ["cpu", "cpu"], 8, placement=[0, 0, 1])
        with torch.no_grad():
            torch.testing.assert_close(split(torch.ones(8, 1000)), torch.full((8, 1000), 0.5))


def test_statistics_that_begin_to_be_tracked_later_are_not_updated_twice() -> None:
    norm = nn.BatchNorm1d(2)
    split = pipe(nn.Sequential(nn.Linear(2, 2), norm), [1, 1], chunks=4, checkpoint="always")
    norm.eval()
    split(torch.randn(8, 2)).sum().backward()
    norm.train()
    split(torch.randn(8, 2)).sum().backward()
    assert int(norm.num_batches_tracked) == 4


def test_deferred_statistics_forget_a_pass_that_failed() -> None:
    class Fail(nn.Module):
        active = True

        def forward(self, x: Tensor) -> Tensor:
            if self.active:
                raise ArithmeticError
            return x

    torch.manual_seed(0)
    fail, plain = Fail(), nn.BatchNorm1d(3).double()
    split = pipe(nn.Sequential(copy.deepcopy(plain), fail), [2], chunks=4, deferred_batch_norm=True)
    with pytest.raises(ArithmeticError):
        split(1e6 * torch.randn(8, 3, dtype=torch.float64))
    fail.active = False
    x = torch.randn(8, 3, dtype=torch.float64)
    split(x), plain(x)
    torch.testing.assert_close(split.state_dict()["0.running_mean"], plain.running_mean)


def test_the_layers_of_harness_dropout_have_masks_of_their_own() -> None:
    split = pipe(nn.Sequential(*(Dropout(0.5) for _ in range(4))), [2, 2], chunks=1)
    kept = (split(torch.ones(100, 100)) != 0).double().mean()
    assert kept == pytest.approx(1 / 16, abs=0.02)


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x * 1

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        time.sleep(0.05)
        return gradient


class Slow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = SlowBackward.apply(x)
        return result


def test_an_interrupt_in_the_backward_pass_ends_the_work() -> None:
    gc.collect()
    split = pipe(nn.Sequential(nn.Linear(2, 2), Slow(), nn.Linear(2, 2)), [2, 1], chunks=16, checkpoint="never")
    loss = split(torch.randn(16, 2)).sum()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
        time.sleep(5)
    split.zero_grad()
    time.sleep(1)  # the backward pass takes 0.8 s
    assert all(p.grad is None for p in split.parameters()), "nothing is written after the interrupt was reported"


def test_an_input_gradient_of_some_micro_batches_only() -> None:
    class Sometimes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else torch.zeros_like(x)

    for x in (torch.tensor([[1.0], [-1.0]]), torch.tensor([[-1.0], [1.0]])):
        x.requires_grad_()
        pipe(nn.Sequential(Sometimes(), nn.Linear(1, 1, bias=False)), [1, 1], checkpoint="never")(x).sum().backward()
        assert x.grad is not None
        assert ((x.grad != 0) == (x > 0)).all()


def test_second_derivatives_are_refused() -> None:
    split = pipe(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [1, 1])
    with pytest.raises(RuntimeError, match="no second derivatives"):
        split(torch.ones(2, 1)).sum().backward(create_graph=True)


def test_a_graph_may_outlive_its_pipeline_and_a_closed_one_says_so() -> None:
    layers = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))

    def loss() -> Tensor:
        return pipe(layers, [1, 1])(torch.ones(2, 1)).sum()  # type: ignore[no-any-return]

    open_loss = loss()
    gc.collect()
    open_loss.backward()
    assert layers[0].weight.grad is not None
    split = pipe(layers, [1, 1])
    split.close()
    with pytest.raises(RuntimeError, match=r"close\(\) was called"):
        split(torch.ones(2, 1))


def test_a_dropped_output_takes_its_activations_along() -> None:
    kept = []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            kept.append(weakref.ref(y))
            return torch.tanh(y) * y

    split = pipe(nn.Sequential(nn.Linear(2, 2), Look(), nn.Linear(2, 2)), [2, 1], checkpoint="never")
    gc.collect()
    gc.disable()
    try:
        output = split(torch.ones(4, 2))
        del output
        time.sleep(0.1)
        assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()


def test_building_a_pipeline_leaves_the_threads_of_others_alone() -> None:
    before = torch.get_num_threads()
    pipe(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [1, 1])
    assert torch.get_num_threads() == before
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert found == [before]


def test_never_more_than_the_given_micro_batches_in_flight() -> None:
    """In flight on a stage: forward done, backward not yet."""
    split = pipe(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), [1, 1, 1], chunks=3)
    split(torch.randn(9, 4)).sum().backward()
    for stage in range(3):
        spans = [s for s in split.spans if s.device == stage and Op.parse(s.op).kind in ("F", "B")]
        changes = [1 if Op.parse(s.op).kind == "F" else -1 for s in sorted(spans, key=lambda s: s.start_s)]
        in_flight = [sum(changes[: k + 1]) for k in range(len(changes))]
        assert max(in_flight) == 3 and in_flight[-1] == 0


@pytest.mark.parametrize("name", ["seed", "stages", "forward", "layout", "spans", "training"])
def test_layers_called_like_attributes_are_refused(name: str) -> None:
    layers = nn.Sequential()
    layers._modules[name] = nn.Identity()
    with pytest.raises(ValueError, match=f"layers must not be called '{name}'"):
        pipe(layers, [1])


def test_an_error_is_searched_for_without_touching_gradients() -> None:
    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x * 1

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            raise ArithmeticError

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = Fail.apply(x)
            return result

    last = nn.Linear(1, 1, bias=False)
    split = pipe(nn.Sequential(nn.Linear(1, 1), Failing(), last), [1, 2], chunks=1, checkpoint="never")
    with pytest.raises(ArithmeticError) as raised:
        split(torch.ones(1, 1)).sum().backward()
    assert raised.value.__notes__ == ["in stage 1, layer '1', micro-batch 0, backward"]
    assert last.weight.grad is not None
    expected = copy.deepcopy(last.weight.grad)
    last.zero_grad()
    with pytest.raises(ArithmeticError):
        split(torch.ones(1, 1)).sum().backward()
    torch.testing.assert_close(last.weight.grad, expected)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_layers_may_work_in_place_also_at_the_beginning_of_a_stage(checkpoint: str) -> None:
    class AddOne(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1)

    torch.manual_seed(0)
    first, second, third = (nn.Linear(3, 3) for _ in range(3))
    plain = nn.Sequential(AddOne(), first, nn.ReLU(inplace=True), second, AddOne(), third).double()
    split = pipe(copy.deepcopy(plain), [2, 2, 2], checkpoint=checkpoint)
    x = torch.randn(4, 3, dtype=torch.float64)
    for _ in range(2):
        plain(x.clone()).sum().backward()
        split(x.clone()).sum().backward()
    for mine, theirs in zip(split.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_frozen_stages(frozen: int) -> None:
    plain = mlp(layers=3)
    plain[frozen].requires_grad_(False)
    split = pipe(copy.deepcopy(plain), [1, 1, 1], checkpoint="always")
    x = torch.randn(4, 4, dtype=torch.float64)
    plain(x).sum().backward()
    split(x).sum().backward()
    for mine, theirs in zip(split.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_two_passes_may_be_open_at_once_but_each_goes_backward_once() -> None:
    plain = mlp()
    split = pipe(copy.deepcopy(plain), [2, 2], checkpoint="always")
    x = torch.randn(4, 4, dtype=torch.float64)
    (plain(x).sum() + plain(2 * x).sum()).backward()
    loss = split(x).sum() + split(2 * x).sum()
    loss.backward(retain_graph=True)
    for mine, theirs in zip(split.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    with pytest.raises(RuntimeError, match="has had its backward pass"):
        loss.backward()


def test_a_copy_is_a_pipeline_of_its_own() -> None:
    split = pipe(mlp(), [2, 2])
    x = torch.randn(4, 4, dtype=torch.float64)
    expected = split(x)
    other = copy.deepcopy(split)
    with torch.no_grad():
        next(split.parameters()).zero_()
    split.close()
    torch.testing.assert_close(other(x), expected)


def test_a_queue_computes_with_one_thread_whatever_the_process_has():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    queue, run, seen = JobQueue(0, "compute"), Run(), []
    try:
        queue.submit(Job(run, lambda: seen.append(torch.get_num_threads()))).wait()
        run.raise_error()
        assert torch.get_num_threads() == 2
    finally:
        queue.close()
        torch.set_num_threads(before)
    assert seen == [1]


class Crowd:
    """Knows the most tasks that have computed at the same time. No layer holds it: they share nothing that changes."""

    def __init__(self) -> None:
        self.lock, self.there, self.most, self.fails = threading.Lock(), 0, 0, False

    def stay(self) -> None:
        with self.lock:
            self.there += 1
            self.most = max(self.most, self.there)
        time.sleep(0.01)
        with self.lock:
            self.there -= 1


CROWD = Crowd()


class Crowded(nn.Module):
    """Stays for a while, forward and backward."""

    def forward(self, x: Tensor) -> Tensor:
        CROWD.stay()
        if CROWD.fails:
            raise RuntimeError("once")
        if x.requires_grad:
            x.register_hook(lambda gradient: CROWD.stay())
        return x * 2


def test_tasks_take_turns_while_layers_are_compiled() -> None:
    """The compiler's settings belong to the process. Of a pass that fails not all may be compiled."""
    layers = nn.Sequential(nn.Linear(4, 4), Crowded(), nn.Linear(4, 4), Crowded())
    split = pipe(layers, [2, 2], chunks=4, checkpoint="always")

    def most(samples: int) -> int:
        CROWD.most = 0
        split(torch.randn(samples, 4)).sum().backward()
        return CROWD.most

    assert most(8) == 2
    split[0]._compiled_call_impl = split[0]._call_impl
    CROWD.fails = True
    with pytest.raises(RuntimeError, match="once"):
        most(8)
    CROWD.fails = False
    assert [most(8), most(8), most(16), most(16)] == [1, 2, 1, 2]
