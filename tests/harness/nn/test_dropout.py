from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from harness.nn.dropout import Dropout, keyed, number


def mask(layer: Dropout, *key: int, shape: tuple[int, ...] = (4, 5, 6), dtype: torch.dtype = torch.float64) -> Tensor:
    with keyed(*key):
        return layer(torch.ones(shape, dtype=dtype))


def two_layers() -> list[Dropout]:
    model = nn.Sequential(Dropout(), nn.Sequential(nn.ReLU(), Dropout()))
    number(model)
    return [module for module in model.modules() if isinstance(module, Dropout)]


def test_a_mask_depends_on_every_part_of_its_key_and_on_nothing_else() -> None:
    first, second = two_layers()
    assert (first.layer, second.layer) == (0, 1)
    reference = mask(first, 1, 2, 3)
    torch.manual_seed(99)
    assert torch.equal(mask(first, 1, 2, 3), reference)
    for other in (mask(first, 0, 2, 3), mask(first, 1, 0, 3), mask(first, 1, 2, 0), mask(second, 1, 2, 3)):
        assert not torch.equal(other, reference)


def test_keys_do_not_touch_the_global_generator() -> None:
    before = torch.get_rng_state()
    mask(Dropout(), 0, 0, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_dtype_drops_the_same_elements() -> None:
    masks = [mask(Dropout(0.25), 1, 2, 3, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    assert all(torch.equal(found != 0, masks[0] != 0) for found in masks)
    assert [found.dtype for found in masks] == [torch.float64, torch.float32, torch.bfloat16]
    assert set(masks[0].unique().tolist()) == {0.0, 1 / 0.75}


def test_threads_at_once_see_the_masks_of_their_own_keys() -> None:
    layer = Dropout()
    expected = [mask(layer, 0, 0, i) for i in range(20)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: mask(layer, 0, 0, i), range(20)))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("key", [(0, 0, 0), None])
def test_share_of_dropped_elements_and_mean(key: tuple[int, int, int] | None) -> None:
    layer, x = Dropout(0.3), torch.ones(200, 500)
    torch.manual_seed(0)
    out = mask(layer, *key, shape=(200, 500)) if key else layer(x)
    assert (out == 0).double().mean().item() == pytest.approx(0.3, abs=0.01)
    assert out.mean().item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("key", [(0, 0, 0), None])
def test_channels_are_dropped_whole(key: tuple[int, int, int] | None) -> None:
    layer, shape = Dropout(0.5, channels=True), (8, 16, 3, 3)
    torch.manual_seed(0)
    out = mask(layer, *key, shape=shape) if key else layer(torch.ones(shape))
    whole = out.flatten(2)
    assert torch.equal(whole.amin(2), whole.amax(2))
    assert 0 < (whole[..., 0] == 0).sum() < 8 * 16


def test_outside_of_a_key_it_draws_as_nn_dropout() -> None:
    x = torch.randn(10, 10)
    for mine, theirs in ((Dropout(0.4), nn.Dropout(0.4)), (Dropout(0.4, channels=True), nn.Dropout2d(0.4))):
        images = x.view(2, 5, 2, 5)
        torch.manual_seed(5)
        expected = theirs(images)
        torch.manual_seed(5)
        assert torch.equal(mine(images), expected)


def test_it_is_the_identity_in_evaluation_and_without_probability() -> None:
    x = torch.randn(3, 4)
    with keyed(0, 0, 0):
        assert Dropout(0.5).eval()(x) is x
        assert Dropout(0.0)(x) is x


def test_the_gradient_is_the_mask() -> None:
    layer, x = Dropout(), torch.ones(4, 5, 6, dtype=torch.float64, requires_grad=True)
    with keyed(1, 2, 3):
        layer(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, mask(layer, 1, 2, 3))


def test_keys_nest_and_are_undone_by_an_error() -> None:
    layer = Dropout()
    outer = mask(layer, 1, 1, 1)
    with keyed(1, 1, 1):
        with pytest.raises(ZeroDivisionError), keyed(2, 2, 2):
            raise ZeroDivisionError
        assert torch.equal(layer(torch.ones(4, 5, 6, dtype=torch.float64)), outer)


@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_an_impossible_probability_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match=f"dropout probability is {p}, must be at least 0 and below 1"):
        Dropout(p)
