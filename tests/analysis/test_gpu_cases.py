"""The published cases are read whole, each in one of the two halves, and predicted from counted work."""

from __future__ import annotations

import pytest

from analysis.gpu_cases import cases, predict
from harness.config import cluster_config
from harness.measure.count_model import count

CASES = cases.load()


def test_each_case_is_listed_once_and_half_of_them_are_held_back() -> None:
    assert len({case.name for case in CASES}) == len(CASES) == 231
    held_back = [case for case in CASES if case.held_back]
    assert 90 < len(held_back) < 130
    assert {case.gpu for case in held_back} == {case.gpu for case in CASES} == {"a100_40", "a100_80", "h100"}


def test_a_step_has_the_published_tokens() -> None:
    (case,) = (one for one in CASES if one.name == "llm-foundry a100_80 x8 7b 2048 micro-batch 6 x2")
    assert case.step_s == pytest.approx(96 * 2048 / (4641 * 8))
    (paper,) = (one for one in CASES if one.name == "megatron a100_80 x3072 1008.0B")
    assert paper.tokens_s_device * 3072 * paper.step_s == pytest.approx(3072 * 2048)


def test_one_block_is_counted_for_all() -> None:
    case = next(one for one in CASES if one.hidden == 768 and one.devices == 8 and one.sequence == 512)
    from harness.cli.compose import compose
    from harness.config import registry

    words = {"layers": case.layers, "hidden": case.hidden, "heads": case.heads, "sequence": case.sequence}
    config = compose(
        ["model=gpt", f"model.vocabulary={case.vocabulary}", *(f"model.{k}={v}" for k, v in words.items())]
    )
    whole = count(registry.build("model", config.model), case.micro_batch, "bfloat16")
    device = cluster_config.build(cluster_config.from_group(predict.configuration(case).cluster)).device
    shown = predict.counted(case, device)
    assert [layer.name for layer in shown.layers] == [layer.name for layer in whole.layers]
    for one, other in zip(shown.layers, whole.layers, strict=True):
        assert (one.flops, one.bytes_moved, one.param_bytes, one.kernels) == (
            other.flops, other.bytes_moved, other.param_bytes, other.kernels,
        )  # fmt: skip
