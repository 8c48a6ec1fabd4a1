"""The published cases are read whole, each in one of the two halves, and predicted from counted work."""

from __future__ import annotations

import statistics

import pytest

from analysis.gpu_cases import __main__, cases, fit, image_cases, predict
from analysis.gpu_cases.__main__ import error
from harness.cli.compose import compose
from harness.config import cluster_config
from harness.measure.count_model import count
from tests import tiers

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


@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize(
    ("gpu", "worst"), tiers.split([("a100_40", 0.29), ("a100_80", 0.27), ("h100", 0.2)], [("h100", 0.2)])
)
def test_speeds_that_were_held_back_from_the_fit_are_predicted(gpu: str, worst: float) -> None:
    """The worst ones: 70 billion parameters on 64 A100 with 40 GB, and 30 billion in micro-batches of one sample."""
    held_back = [case for case in CASES if case.gpu == gpu and case.publication == "llm-foundry" and case.held_back]
    errors = sorted(error(predict.step_s(case) / case.step_s) for case in held_back)
    assert len(errors) >= 30
    assert statistics.median(errors) < 0.05 and errors[len(errors) * 9 // 10] < 0.15 and errors[-1] < worst


@pytest.mark.usefixtures("computation")
def test_the_numbers_of_the_clusters_are_those_of_the_fit() -> None:
    """All clusters with such a GPU have the same ones."""

    def numbers(name: str) -> dict[str, float]:
        group = compose([f"cluster={name}"]).cluster
        own = group.effective if group.effective.matmul_efficiency else group
        return {key: own[key] for key in fit.KEYS[:4]}

    assert numbers("dgx_a100_40") == numbers("dgx_a100_80") == numbers("gcp_a100")
    assert numbers("dgx_h100") == numbers("h200") != numbers("gcp_a100")


def test_the_command_has_errors_and_orders(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "step_s", lambda case: case.step_s * (1.5 if case.name.endswith("ZeRO-3") else 1.1))
    monkeypatch.setattr(cases, "load", lambda: [case for case in CASES if case.compared])
    monkeypatch.setattr(image_cases, "load", lambda: [])
    __main__.main(["--all"])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "megatron a100_80 held back 12 30 % 50 % 1.30" in lines
    assert sum(line.endswith("measured ZeRO-3 < PTD-P, predicted ZeRO-3 < PTD-P") for line in lines) == 6
    assert lines[2].startswith("case measured predicted")
    assert all(line.endswith("1.50") for line in lines[3:9]), "the worst first"
