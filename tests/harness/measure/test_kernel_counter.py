"""Kernels and their bytes, operation by operation: x is 4 x 6 floats, 96 bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from harness.measure.kernel_counter import Work


def work_alone() -> Work:
    return Work(nn.Module(), 1)


X = 4 * 6 * 4

CASES: dict[str, tuple[Callable[[Tensor], object], int, int, int]] = {
    # what runs: kernels, bytes of kernels with FLOPs, bytes of elementwise ones
    "nothing": (lambda x: x, 0, 0, 0),
    "views": (lambda x: x.view(24).detach().reshape(2, 12).t()[1:].expand(3, 11, 2).unbind(0), 0, 0, 0),
    "an unsafe split": (lambda x: torch.ops.aten.unsafe_split(x, 2), 0, 0, 0),
    "memory alone": (lambda x: (torch.empty(5), torch.empty_like(x), x.new_empty(3)), 0, 0, 0),
    "an item": (lambda x: x[0, 0].item(), 0, 0, 0),
    "relu": (lambda x: x.relu(), 1, 0, 2 * X),
    "in place": (lambda x: x.relu_(), 1, 0, 2 * X),
    "a scalar": (lambda x: x + 1, 1, 0, 2 * X),
    "x and x": (lambda x: x + x, 1, 0, 2 * X),
    "x and its transpose": (lambda x: x @ x.t(), 1, X + 4 * 4 * 4, 0),
    "halves of x": (lambda x: x[:, :3] + x[:, 3:], 1, 0, X + X // 2),
    "a broadcast row": (lambda x: x + x[0].expand(4, 6) * 1, 2, 0, (6 + 24) * 4 + 3 * X),
    "a smaller format": (lambda x: x.to(torch.bfloat16), 1, 0, X + X // 2),
    "the same format": (lambda x: x.to(torch.float32), 0, 0, 0),
    "a copy of a transpose": (lambda x: x.t().contiguous(), 1, 0, 2 * X),
    "what is made": (lambda x: torch.zeros(4, 6), 1, 0, X),
    "random numbers": (lambda x: torch.rand(4, 6), 1, 0, X),
    "random numbers in place": (lambda x: x.bernoulli_(0.5), 1, 0, X),
    "an empty tensor": (lambda x: torch.empty(0, 6) + 1, 1, 0, 0),
    "filled": (lambda x: x.fill_(2).zero_(), 2, 0, 2 * X),
    "copied into": (lambda x: x.copy_(torch.empty(4, 6)), 1, 0, 2 * X),
    "a table": (lambda x: functional.embedding(torch.tensor([1]), x), 1, 0, 8 + 6 * 4 + 6 * 4),
    "all of a table, twice": (lambda x: x[[0, 1, 2, 3] * 2], 1, 0, 8 * 8 + X + 2 * X),
    "pooling with its indices": (lambda x: functional.max_pool1d_with_indices(x, 2), 1, 0, X + X // 2 + X),
    "attention": (lambda x: functional.scaled_dot_product_attention(*[x.view(1, 1, 4, 6)] * 3), 1, 2 * X + 16, 0),
    "a linear layer": (lambda x: functional.linear(x, torch.empty(2, 6), torch.empty(2)), 1, X + 48 + 8 + 32, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_operations_by_hand(case):
    run, kernels, product_bytes, elementwise_bytes = CASES[case]
    x = torch.ones(4, 6)
    with work_alone() as work:
        run(x)
    assert work.kernels == kernels
    assert work.elementwise_bytes == elementwise_bytes
    assert work.bytes_moved == product_bytes + elementwise_bytes
    assert (work.flops > 0) == (product_bytes > 0)


def test_flops_of_a_product_and_a_convolution():
    with work_alone() as work:
        torch.empty(3, 4) @ torch.empty(4, 5)
        assert work.flops == 2 * 3 * 4 * 5
        nn.Conv2d(3, 8, 3, padding=1, bias=False)(torch.empty(2, 3, 10, 10)).exp()
    assert work.flops == 2 * 3 * 4 * 5 + 2 * (2 * 10 * 10) * (9 * 3 * 8)


def test_what_batch_norms_read():
    images = torch.empty(2, 3, 10, 10)
    with work_alone() as work:
        nn.Conv2d(3, 8, 1)(nn.BatchNorm2d(3)(images).relu())
        assert work.norm_bytes == 4 * images.numel()
        nn.LayerNorm(10)(nn.BatchNorm2d(3).eval()(images))
    assert work.norm_bytes == 2 * 4 * images.numel()


@given(st.lists(st.sampled_from(sorted(CASES)), max_size=5))
def test_work_adds_up(names):
    apart = []
    with work_alone() as work:
        for name in names:
            with work_alone() as one:
                CASES[name][0](torch.empty(4, 6))
            apart.append(one)
            CASES[name][0](torch.empty(4, 6))
    assert work.kernels == 2 * sum(one.kernels for one in apart)
    assert work.bytes_moved == 2 * sum(one.bytes_moved for one in apart)
