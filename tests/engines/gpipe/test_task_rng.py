"""Plain random layers in a pipeline: every task draws from a stream of its own, whatever other threads do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from engines.gpipe.gpipe_module import GPipe
from engines.gpipe.task_rng import TaskRng, global_state


def test_every_task_draws_other_numbers() -> None:
    """In all stages, micro-batches and passes."""
    drawn: list[tuple[float, ...]] = []

    class Draw(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            drawn.append(tuple(torch.rand(4).tolist()))
            return x

    split = GPipe(nn.Sequential(Draw(), Draw(), Draw()), [1, 1, 1], ["cpu"] * 3, 4)
    for _ in range(2):
        split(torch.ones(4, 1))
    assert len(drawn) == len(set(drawn)) == 2 * 3 * 4


def test_masks_of_equal_layers_differ() -> None:
    split = GPipe(nn.Sequential(*(nn.Dropout(0.5) for _ in range(4))), [1] * 4, ["cpu"] * 4, 4)
    kept = split(torch.ones(4, 4000)) != 0
    assert kept.double().mean() == pytest.approx(1 / 16, abs=0.01)
    assert all(not torch.equal(kept[i], kept[j]) for i in range(4) for j in range(i))


@contextmanager
def another_thread_that_draws() -> Iterator[None]:
    end, begun = threading.Event(), threading.Event()

    def draw() -> None:
        while not end.is_set():
            torch.rand(1)
            begun.set()

    thread = threading.Thread(target=draw)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
def test_draws_of_another_thread_disturb_nothing(mode: str) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    x = torch.randn(16, 4, dtype=torch.float64)
    split = GPipe(layers, [1, 2], ["cpu"] * 2, 8, mode)
    want = torch.autograd.grad(layers(x).sum(), [*layers.parameters()])
    with another_thread_that_draws():
        for _ in range(5):
            split.zero_grad()
            split(x).sum().backward()
            torch.testing.assert_close([p.grad for p in split.parameters()], [*want])


def test_several_threads_may_call_one_pipeline() -> None:
    split = GPipe(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), [1, 2], ["cpu"] * 2, 4, "always")
    x, failed = torch.randn(8, 4), []

    def call() -> None:
        try:
            for _ in range(5):
                split(x)
        except RuntimeError as error:
            failed.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_masks_are_repeated_while_another_thread_draws() -> None:
    """A mask of the recomputation that differs would leave gradients where the output is zero."""
    split = GPipe(nn.Sequential(*(nn.Dropout(0.3) for _ in range(6))), [3, 3], ["cpu"] * 2, 8, "always")
    with another_thread_that_draws():
        for _ in range(5):
            x = torch.ones(8, 500, requires_grad=True)
            output = split(x)
            output.sum().backward()
            assert x.grad is not None
            torch.testing.assert_close(x.grad, output)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.5),
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.5, training=True),
    "rand": lambda x: torch.rand(x.shape),
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "randint": lambda x: torch.randint(1000, x.shape).float(),
    "randint_like": lambda x: torch.randint_like(x, 3, 1000),
    "randperm": lambda x: torch.randperm(x.numel()).float(),
    "normal": lambda x: torch.normal(x, 1.0),
    "normal_": lambda x: x.clone().normal_(),
    "bernoulli": lambda x: torch.bernoulli(x / 2),
    "multinomial": lambda x: torch.multinomial(x, 20).float(),
    "rrelu": lambda x: functional.rrelu(-x, training=True),
    "poisson": lambda x: torch.poisson(50 * x),
    "exponential_": lambda x: x.clone().exponential_(),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "gamma": lambda x: torch._standard_gamma(x),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_a_stream_repeats_and_leaves_the_global_generator_alone(draw: str) -> None:
    torch.manual_seed(0)
    state, x = torch.get_rng_state(), torch.ones(40)

    def drawn(seed: int) -> Tensor:
        with TaskRng(seed) as stream:
            found = torch.stack([DRAWS[draw](x), DRAWS[draw](x)])
        assert stream.drew
        torch.rand(3)
        return found

    first = drawn(1)
    assert not torch.equal(first[0], first[1])
    assert torch.equal(drawn(1), first)
    assert not torch.equal(drawn(2), first)
    torch.set_rng_state(state)
    with TaskRng(1):
        DRAWS[draw](x)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_op_with_a_generator_of_its_own_is_left_alone() -> None:
    with TaskRng(1) as stream:
        torch.rand(3, generator=torch.Generator())
    assert not stream.drew


def attention(dropout: float) -> Callable[[Tensor], Tensor]:
    """An op that takes no generator, and may draw from the global one."""

    def attend(x: Tensor) -> Tensor:
        heads = x.view(1, 2, 4, -1)
        return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=dropout)

    return attend


@pytest.mark.parametrize(("dropout", "draws"), [(0.0, False), (0.5, True)])
def test_an_op_that_may_draw_and_does_not(dropout: float, draws: bool) -> None:
    with TaskRng(1) as stream:
        attention(dropout)(torch.ones(40))
    assert stream.drew == draws


def test_a_stage_with_attention_has_no_stream_once_it_is_known_not_to_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream takes Python for every op, in threads that wait for its lock."""
    streams: list[int] = []
    made = TaskRng.__init__

    def counted(self: TaskRng, seed: int) -> None:
        streams.append(seed)
        made(self, seed)

    monkeypatch.setattr(TaskRng, "__init__", counted)

    class Attention(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return attention(0.0)(super().forward(x)).view_as(x)

    pipeline = GPipe(nn.Sequential(Attention(40, 40), Attention(40, 40)), [1, 1], ["cpu"] * 2, 4, checkpoint="always")
    for _ in range(2):
        pipeline(torch.ones(4, 40)).sum().backward()
    assert len(streams) == 2, "the first task of each stage"


def test_attention_without_dropout_inside_of_a_checkpoint() -> None:
    with TaskRng(1):
        checkpoint(attention(0.0), torch.ones(40, requires_grad=True), use_reentrant=False).sum().backward()
    with pytest.raises(RuntimeError, match=r"torch\.utils\.checkpoint inside of a layer draws"), TaskRng(1):
        checkpoint(attention(0.5), torch.ones(40, requires_grad=True), use_reentrant=False)


def test_a_task_that_draws_in_place_of_the_global_generator_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stage would think that its own task has drawn."""
    torch.manual_seed(0)
    state, swapped, put = torch.get_rng_state(), threading.Event(), torch.set_rng_state

    def slowly(new: Tensor) -> None:
        put(new)
        swapped.set()
        time.sleep(0.05)

    def draw() -> None:
        with TaskRng(1):
            DRAWS["native_dropout"](torch.ones(40))

    monkeypatch.setattr(torch, "set_rng_state", slowly)
    thread = threading.Thread(target=draw)
    thread.start()
    assert swapped.wait(10)
    assert torch.equal(global_state(), state)
    thread.join()


@pytest.mark.parametrize("mode", ["never", "always"])
def test_a_stage_that_begins_to_draw_later(mode: str) -> None:
    """Its next tasks draw from streams of their own: a pass can be repeated."""

    class Attention(nn.Module):
        dropout = 0.0

        def forward(self, x: Tensor) -> Tensor:
            return attention(self.dropout)(x).view_as(x)

    pipeline = GPipe(nn.Sequential(nn.Linear(40, 40), Attention()), [1, 1], ["cpu"] * 2, 4, checkpoint=mode)
    pipeline(torch.ones(4, 40)).sum().backward()
    assert pipeline._draws[True] == {0: False, 1: False}
    Attention.dropout = 0.5
    pipeline(torch.ones(4, 40)).sum().backward()
    assert pipeline._draws[True][1], "and perhaps the other stage, which has seen the global generator change"
