from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from harness.nn.skip import LayerSkip, Skippable, carried, isolate, layer_skips


class Stash(Skippable):
    stashes = ("x",)

    def forward(self, x: Tensor) -> Tensor:
        self.stash("x", x)
        return x + 1


class Pop(Skippable):
    pops = ("x",)

    def forward(self, x: Tensor) -> Tensor:
        return x + 100 * self.pop("x")


class Wrong(Skippable):
    def forward(self, x: Tensor) -> Tensor:
        self.stash("x", x)
        return self.pop("x")


def skips(*layers: nn.Module) -> list[LayerSkip]:
    return layer_skips([(f"l{number}", layer) for number, layer in enumerate(layers)])


def test_a_plain_sequence_runs_as_it_is() -> None:
    model = nn.Sequential(Stash(), nn.Identity(), Pop())
    assert model(torch.tensor([2.0])).tolist() == [203.0]


def test_split_stages_give_the_same_with_skips_carried_by_hand() -> None:
    first, second = nn.Sequential(Stash(), nn.Identity()), nn.Sequential(Pop())
    with carried({}) as leaving:
        middle = first(torch.tensor([2.0]))
    assert {name: value.tolist() for name, value in leaving.items()} == {"x": [2.0]}
    with carried(leaving) as left:
        assert second(middle).tolist() == [203.0]
    assert left == {}
    assert list(leaving) == ["x"], "the caller's dict is not changed: a recomputation needs it again"


def test_carried_nests_and_is_undone_by_an_error() -> None:
    with carried({"x": torch.tensor([1.0])}):
        with pytest.raises(ZeroDivisionError), carried({"x": torch.tensor([5.0])}):
            raise ZeroDivisionError
        assert Pop()(torch.tensor([0.0])).tolist() == [100.0]


def test_threads_do_not_see_each_other() -> None:
    def run(value: float) -> float:
        with carried({"x": torch.tensor(value)}):
            return float(Pop()(torch.tensor(0.0)))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, range(20))) == [100.0 * value for value in range(20)]


def test_a_block_can_be_repeated_in_namespaces() -> None:
    def block(name: str) -> list[nn.Module]:
        return [isolate(layer, name) for layer in (Stash(), Pop())]

    (a_in, a_out), (b_in, b_out) = block("a"), block("b")
    nested = nn.Sequential(a_in, b_in, b_out, a_out)
    assert nested(torch.tensor([1.0])).tolist() == [(1 + 2) + 200 + 100]
    assert skips(a_in, b_in, b_out, a_out) == [LayerSkip("a/x", 0, 3), LayerSkip("b/x", 1, 2)]
    assert isolate(a_in, "outer") is a_in
    assert a_in.key("x") == "outer/a/x"  # type: ignore[operator]


def test_isolate_reaches_into_composite_layers_and_inner_skips_do_not_count() -> None:
    inner = isolate(nn.Sequential(Stash(), Pop()), "n")
    assert skips(Stash(), inner, Pop()) == [LayerSkip("x", 0, 2)]


@pytest.mark.parametrize(
    ("layers", "problems"),
    [
        ([Stash(), nn.ReLU()], ["layer 'l0' stashes 'x', which no later layer pops"]),
        ([nn.ReLU(), Pop()], ["layer 'l1' pops 'x', which no earlier layer stashes"]),
        (
            [Pop(), Stash()],
            ["layer 'l0' pops 'x', which no earlier layer stashes"],
        ),
        ([Stash(), Pop(), Pop()], ["layer 'l2' pops 'x', which an earlier layer pops"]),
        ([Stash(), Stash(), Pop()], ["layer 'l1' stashes 'x', which layer 'l0' stashes too"]),
        (
            [Stash(), isolate(Pop(), "n")],
            [
                "layer 'l1' pops 'n/x', which no earlier layer stashes",
                "layer 'l0' stashes 'x', which no later layer pops",
            ],
        ),
    ],
)
def test_skips_that_do_not_match_are_refused_with_the_layers(layers: list[nn.Module], problems: list[str]) -> None:
    with pytest.raises(ValueError, match="skips do not match") as refused:
        skips(*layers)
    for problem in problems:
        assert problem in str(refused.value)


def test_undeclared_names_and_missing_stashes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Wrong stashes 'x' but declares only \[\]"):
        Wrong()(torch.zeros(1))
    with pytest.raises(ValueError, match=r"Stash pops 'y' but declares only \[\]"):
        Stash().pop("y")
    with carried({"other": torch.zeros(1)}), pytest.raises(LookupError, match="Pop pops 'x', but no layer stashed it"):
        Pop()(torch.zeros(1))
