"""Changes of parameters that torch does not count are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from harness.runtime.silent_writes import SilentWrites

WRITES: dict[str, Callable[[Tensor], object]] = {
    "data": lambda p: p.data.mul_(0.9),
    "NumPy": lambda p: p.detach().numpy().__imul__(0.9),
    "other data": lambda p: setattr(p, "data", p.data.clone()),
}


@pytest.mark.parametrize("shape", [(), (3,), (40, 50), (5, 4, 3)])
@pytest.mark.parametrize("write", WRITES)
def test_what_changes_is_named(write: str, shape: tuple[int, ...]) -> None:
    parameters = [nn.Parameter(torch.rand(shape) + 1) for _ in range(3)]
    parameters.append(nn.Parameter(torch.rand(6, 4).t().double() + 1))
    writes = SilentWrites()
    for changed in (None, *parameters):
        check = writes.before(parameters)
        if changed is not None:
            WRITES[write](changed)
        assert check() is changed


def test_no_number_is_no_change() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, float("nan")]))
    assert (
        SilentWrites().before([parameter, nn.Parameter(torch.empty(0)), nn.Parameter(torch.ones(2).to("meta"))])()
        is None
    )
