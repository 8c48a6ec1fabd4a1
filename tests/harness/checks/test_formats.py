"""Which format to take where a cluster's devices lack one."""

from __future__ import annotations

import pytest

from harness.checks import formats, request
from harness.cli.compose import compose
from harness.config import registry
from harness.core.problem import Problem, apply, typed


def instead(*overrides: str) -> list[str]:
    """The fixes of what is missing, and of nothing else."""
    config = compose(["mode=plan", *overrides])
    lacks = config.precision.autocast or config.precision.dtype
    missing, other = Problem(formats.PEAK + lacks, None, "is needed"), Problem("batch.size", 3, "is wrong")
    can = registry.build("engine", config.engine).capabilities
    first, second = formats.with_instead([missing, other], config, can)
    assert second == other
    return list(map(typed, first.fixes))


@pytest.mark.parametrize(
    ("overrides", "fixes"),
    [
        ("engine=ddp precision=mixed", ["precision.autocast=float16 precision.grad_scaler=true", "precision=fp32"]),
        ("engine=ddp precision=bf16",
         ["precision=mixed precision.autocast=float16 precision.grad_scaler=true", "precision=fp32"]),
        ("engine=myelin precision=bf16", ["precision=fp16", "precision=fp32"]),
        ("engine=deepspeed precision=mixed", ["precision=fp16", "precision=fp32"]),
        ("engine=ddp precision=mixed cluster=p40x8",
         ["precision=fp32", "precision.autocast=float16 precision.grad_scaler=true"]),
        ("engine=fsdp precision=mixed", ["precision=fp32"]),
        ("engine=fsdp precision=mixed engine.mixed_precision=policy",
         ["precision=fp32 engine.mixed_precision=autocast"]),
        ("engine=ddp precision=mixed mode=tune", ["precision=fp32"]),
        ("engine=ddp precision=mixed cluster.peak_tflops.float16=null", ["precision=fp32"]),
        ("engine=ddp precision=fp64 cluster.peak_tflops.float64=null", ["precision=fp32"]),
    ],
)  # fmt: skip
def test_formats_that_engine_and_devices_have(overrides: str, fixes: list[str]) -> None:
    """First the one in which devices are faster. In mode=tune several engines may be asked, not all of which scale."""
    described = [] if "cluster=" in overrides else ["cluster=summit"]
    assert instead(*described, *overrides.split()) == fixes


@pytest.mark.parametrize(
    ("overrides", "fixes"),
    [
        ("engine=ddp", ["precision=fp32", "precision=mixed precision.autocast=float16 precision.grad_scaler=true"]),
        ("engine=ddp cluster=summit",
         ["precision=mixed precision.autocast=float16 precision.grad_scaler=true", "precision=fp32"]),
        ("engine=ddp cluster=summit mode=tune", ["precision=fp32"]),
        ("engine=fsdp cluster=dgx_a100_80", ["precision=mixed", "precision=fp32"]),
        ("engine=fsdp cluster=summit", ["precision=fp32"]),
        ("engine=pipeline", ["precision=fp32", "precision=mixed"]),
    ],
)  # fmt: skip
def test_in_the_place_of_weights_in_float16(overrides: str, fixes: list[str]) -> None:
    """Float16 under autocast with scaled losses, or bfloat16 there; each is accepted."""
    given = ["mode=plan", "precision=fp16", *overrides.split()]
    can = registry.build("engine", compose(given).engine).capabilities
    (problem,) = request.request(compose(given), can, None)
    assert (problem.key, list(map(typed, problem.fixes))) == ("precision", fixes)
    for fix in problem.fixes:
        left = compose(apply(given, fix))
        assert not request.request(left, can, None) and not request.notes(left, can)


MEASURED = {"float32": 15e12, "float16": 112e12, "bfloat16": 2e12}
"""A V100 computes in bfloat16 by way of float32."""


@pytest.mark.parametrize(
    ("overrides", "peaks", "fixes"),
    [
        ("engine=gpipe precision.autocast=float16 precision.grad_scaler=true", MEASURED,
         ["precision.autocast=null precision.grad_scaler=false",
          "precision.autocast=bfloat16 precision.grad_scaler=false"]),
        ("engine=gpipe precision.autocast=float16 precision.grad_scaler=true", {},
         ["precision.autocast=bfloat16 precision.grad_scaler=false",
          "precision.autocast=null precision.grad_scaler=false"]),
        ("engine=myelin precision=fp16", {"float32": 1e12}, ["precision.dtype=float32"]),
        ("engine=myelin precision=fp16", {"float32": 1e12, "bfloat16": 2e12},
         ["precision.dtype=bfloat16", "precision.dtype=float32"]),
        ("engine=myelin precision=bf16", MEASURED, []),
    ],
)  # fmt: skip
def test_instead_of_float16_the_fastest_format_of_the_devices(
    overrides: str, peaks: dict[str, float], fixes: list[str]
) -> None:
    config = compose(overrides.split())
    can = registry.build("engine", config.engine).capabilities
    found = formats.without_float16(config, can, peaks)
    assert list(map(typed, found)) == fixes
    for fix in found:
        left = apply(overrides.split(), fix)
        assert not request.request(compose(left), can, None) and not request.notes(compose(left), can)


def test_a_format_that_devices_lack_has_no_peak_to_be_typed() -> None:
    """Where they may have it, the user alone knows the peak, and layers can be measured here."""
    can = registry.build("engine", compose([]).engine).capabilities
    lacks = Problem(f"{formats.PEAK}bfloat16", None, "is needed", hint="its peak")
    speed = Problem(formats.BANDWIDTH, None, "is needed", hint="its bandwidth")
    (v100,) = formats.with_instead([lacks], compose(["mode=plan", "cluster=summit", "precision=bf16"]), can)
    assert v100.fixes and not v100.hint
    flat = compose(["mode=plan", "cluster=flat", "precision=bf16", "costs=analytic"])
    for one in formats.with_instead([lacks, speed], flat, can):
        assert list(map(typed, one.fixes)) == ["costs=measured"] and one.hint
    flat.profile = "p.json"
    assert not any(one.fixes for one in formats.with_instead([lacks, speed], flat, can)), "it may be of another device"


def test_none_where_no_peaks_are_known() -> None:
    config = compose(["mode=plan", "cluster=flat", "costs=analytic"])
    assert formats.instead(config, registry.build("engine", config.engine).capabilities) == []


def test_bfloat16_is_for_devices_that_have_it() -> None:
    assert formats.computes(compose(["cluster=dgx_h100"]), "bfloat16")
    assert not formats.computes(compose(["cluster=summit"]), "bfloat16")
    assert formats.computes(compose([]), "bfloat16"), "what this machine's devices have is not known"
