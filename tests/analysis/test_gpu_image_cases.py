"""The published cases of convolutional nets: read whole, each in one of the two halves, and predicted."""

from __future__ import annotations

import statistics

import pytest

from analysis.gpu_cases import __main__, cases, fit_images, image_cases, predict, predict_images
from analysis.gpu_cases.__main__ import error
from analysis.gpu_cases.image_cases import ImageCase
from harness.cli.compose import compose

CASES = image_cases.load()


def test_each_case_is_listed_once_and_half_of_them_are_held_back() -> None:
    assert len({case.name for case in CASES}) == len(CASES) == 58
    assert sum(case.held_back for case in CASES) == 27
    assert {case.gpu for case in CASES if case.held_back} == {"v100", "p100", "a100_40", "a100_80"}
    assert {gpu for clusters in fit_images.GPUS.values() for gpu in clusters} == {case.gpu for case in CASES}


def test_a_step_has_the_published_images() -> None:
    (case,) = (one for one in CASES if one.name == "nvidia-mxnet v100 x8 resnet50 fp16 192")
    assert case.step_s == pytest.approx(8 * 192 / 10723)


@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize(
    ("gpu", "median", "worst"),
    [("v100", 0.06, 0.14), ("a100", 0.09, 0.38), pytest.param("p100", 0.18, 0.31, marks=pytest.mark.full)],
)
def test_speeds_that_were_held_back_from_the_fit_are_predicted(gpu: str, median: float, worst: float) -> None:
    """The worst ones: TensorFlow with XLA, which fuses kernels, and Inception-v3 in TensorFlow of 2017."""
    found = [case for case in CASES if case.gpu.startswith(gpu) and case.held_back]
    errors = sorted(error(predict_images.step_s(case) / case.step_s) for case in found)
    assert len(errors) >= 4
    assert statistics.median(errors) < median and errors[-1] < worst


@pytest.mark.usefixtures("computation")
def test_an_a100_is_faster_than_a_v100_in_float32_with_few_images_too() -> None:
    """Float32 takes neither the share nor the waves of matmuls in bfloat16, which made it the slower one."""

    def faster(batch: int) -> float:
        cases = (ImageCase("", "", gpu, 1, "resnet50", batch, "fp32", 1.0) for gpu in ("v100", "a100_80"))
        v100, a100 = map(predict_images.step_s, cases)
        return v100 / a100

    assert 1 < faster(16) <= faster(256) < 2039 / 900, "at most as the bandwidths of their memories"


@pytest.mark.full
@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize("gpu", [pytest.param("V100", marks=pytest.mark.soak), "A100", "P100"])
def test_the_numbers_of_the_clusters_are_those_of_the_fit(gpu: str) -> None:
    found = fit_images.fit(gpu)
    for name in fit_images.GPUS[gpu]:
        cluster = compose([f"cluster={predict_images.CLUSTERS[name]}"]).cluster
        assert {key: cluster[key] for key in found} == pytest.approx(found, abs=2e-3)


def test_the_command_has_both_kinds_of_cases(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "step_s", lambda case: case.step_s)
    monkeypatch.setattr(predict_images, "step_s", lambda case: 1.25 * case.step_s)
    gpts = [case for case in cases.load() if case.gpu == "h100"]
    monkeypatch.setattr(cases, "load", lambda: gpts)
    __main__.main(["--all"])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "tensorflow p100 held back 4 25 % 25 % 1.25" in lines
    assert "llm-foundry h100 held back 34 0 % 0 % 1.00" in lines
