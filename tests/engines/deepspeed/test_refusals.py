"""What the deepspeed engine refuses before ranks start."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from engines.deepspeed import jit_build
from engines.deepspeed.engine import Config, build, check
from harness.checks.engine_support import early
from harness.cli.compose import compose
from harness.config import registry
from harness.core.cluster import Cluster
from harness.core.memory_model import MemoryModel, named
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.plan import Plan
from harness.core.problem import CannotRun, Problem
from harness.interfaces import BatchShape, Model, PlanRequest, Setting
from harness.planning.draft import draft
from tests.engines import contract
from tests.engines.contract import Case
from tests.engines.deepspeed.cases import case
from tests.problems import Row, row, rows

INSTALL = "pip install 'deepspeed>=0.19,<0.20'"


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (Config(zero=4), ("engine.zero", 4, ["engine.zero=3"])),
        (Config(checkpoint="NEVER"), ("engine.checkpoint", "NEVER", ["engine.checkpoint=never"])),
        (Config(checkpoint="except_last"), ("engine.checkpoint", "except_last", ["engine.checkpoint=always"])),
        (Config(offload=True), ("engine.offload", True, ["engine.zero=1", "engine.offload=false"])),
    ],
)
def test_values_that_no_run_can_have(config: Config, found: Row) -> None:
    assert found in rows(check(config))


def problems(case: Case, dtype: str = "float32", **keys: object) -> Sequence[str]:
    engine, plan, cluster = build(Config(**keys)), case.plan, Cluster("local", 1, 8)  # type: ignore[arg-type]
    request = PlanRequest(BatchShape(case.samples, plan.micro_batches), plan.mesh.pipeline, plan.mesh.data)
    found = engine.check(plan, counted(case.model), cluster, named("sgd_fp32"))
    return [p.key for p in [*engine.refuses(request, dtype, cluster), *found]]


def counted(model: Model) -> ModelProfile:
    """A profile that knows the sizes of the parameters."""
    profile = contract.profile_of(model)
    sizes = [sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in model.layers()]
    layers = tuple(replace(one, param_bytes=size) for one, size in zip(profile.layers, sizes, strict=True))
    return replace(profile, layers=layers)


def test_float64_in_one_stage_is_offered_no_pipeline() -> None:
    """Where the model cannot be split, or has one device."""
    cpus = Cluster("local", 1, 2, cores=2.0)
    for data, layers in ((1, 8), (2, 1)):
        (problem,) = build(Config()).refuses(PlanRequest(BatchShape(8, 4), 1, data, layers=layers), "float64", cpus)
        assert row(problem) == ("precision.dtype", "float64", ["precision.dtype=float32"])


def test_number_formats_that_deepspeed_cannot_train() -> None:
    assert problems(case("skips")) == []
    assert problems(case("skips"), "float64") == []
    assert problems(case("skips", data=2), "float64") == ["precision.dtype"]
    assert problems(case("skips"), "bfloat16") == ["precision.dtype"]
    assert problems(case("skips"), "bfloat16", zero=1) == []
    assert problems(case("skips"), "float16", zero=1) == [], "on GPUs"


@pytest.mark.parametrize(
    ("dtype", "zero", "data", "right"),
    [
        ("float64", 0, 1, ["precision.dtype=float32"]),
        ("float64", 1, 1, ["precision.dtype=float32"]),
        ("float64", 0, 2, ["precision.dtype=float32", "mesh.data=1 mesh.pipeline=2"]),
        ("float64", 3, 2, ["precision.dtype=float32", "engine.zero=0 mesh.data=1 mesh.pipeline=2"]),
        ("bfloat16", 0, 1, ["engine.zero=1"]),
        ("float16", 0, 1, ["precision.dtype=float32"]),
        ("float16", 1, 2, ["precision.dtype=bfloat16"]),
    ],
)
def test_every_fix_is_offered_and_works(dtype: str, zero: int, data: int, right: list[str]) -> None:
    cpus = Cluster("local", 1, 2, cores=2.0)
    (problem,) = build(Config(zero=zero)).refuses(PlanRequest(BatchShape(8, 4), 1, data), dtype, cpus)
    assert row(problem) == ("precision.dtype", dtype, right)
    for fix in problem.fixes:
        engine = build(Config(zero=fix.get("engine.zero", zero)))
        request = PlanRequest(BatchShape(8, 4), fix.get("mesh.pipeline", 1), fix.get("mesh.data", data))
        assert engine.refuses(request, fix.get("precision.dtype", dtype), cpus) == [], fix


@pytest.mark.parametrize(
    ("zero", "plan", "fix"),
    [
        (1, Plan.contiguous([7, 7], 4), "engine.zero=0"),
        (3, Plan.contiguous([14], 4), "engine.zero=0 mesh.pipeline=1"),
    ],
)
def test_one_replica_has_nothing_to_shard(zero: int, plan: Plan, fix: str) -> None:
    """The fix keeps the mesh."""
    cluster, layers = Cluster(devices_per_node=2), ModelProfile((LayerProfile(),) * 14)
    found = build(Config(zero=zero)).notes(plan, layers, cluster, MemoryModel())
    assert rows(found) == [("engine.zero", zero, [fix])]
    assert build(Config(zero=0)).notes(plan, layers, cluster, MemoryModel()) == []
    shared = replace(plan, mesh=replace(plan.mesh, data=2))
    assert build(Config(zero=zero)).notes(shared, layers, cluster, MemoryModel()) == []
    for needed in (Config(zero=zero, offload=True), Config(zero=zero)):
        seen = layers if needed.offload else replace(layers, dtype="bfloat16")
        assert build(needed).notes(plan, seen, cluster, MemoryModel()) == [], "ZeRO has the copies in float32"


def test_zero_2_and_3_have_no_pipeline() -> None:
    can = build(Config(zero=2)).capabilities
    assert (can.pipeline, can.data) == (False, True)
    assert can.disabled_by["pipeline"] == Setting({"engine.zero": 2}, {"engine.zero": 1})
    assert build(Config(zero=1)).capabilities.pipeline


def test_zero_needs_parameters_in_every_stage() -> None:
    """The first layer of "skips" has none."""
    bare = case("skips")
    bare = replace(bare, plan=Plan.contiguous([1, 13], 4))
    assert problems(bare) == []
    assert problems(bare, zero=1) == ["engine.zero"]


# versions


def installed(folder: Path, version: str) -> str:
    """A folder for sys.path in which deepspeed has this version."""
    info = folder / f"deepspeed-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n")
    return str(folder)


@pytest.mark.parametrize("version", ["0.18.9", "0.20.0", "0.190.1", "1.0.19"])
def test_another_version(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(installed(tmp_path, version))
    (found,) = check(Config())
    assert (found.key, found.value, found.hint) == ("engine", "deepspeed", INSTALL) and version in found.message
    assert registry.problems("engine", OmegaConf.structured(Config())) == [found]


@pytest.mark.parametrize("version", ["0.19", "0.19.0", "0.19.12", "0.19.8+unknown"])
def test_the_version_that_it_is_made_for(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(installed(tmp_path, version))
    assert check(Config()) == []


def test_nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    without_packages(monkeypatch)
    (found,) = check(Config())
    assert (found.key, found.value, found.hint) == ("engine", "deepspeed", INSTALL)


def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python finds nothing that is not its own."""
    for name in ("deepspeed", "ninja"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [])


# offloading


def tools(folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """The machine has these commands and no others."""
    for name in names:
        place = folder / name
        place.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)


OFFLOAD = Config(zero=1, offload=True)


def missing() -> list[str]:
    """What the compilation of the offloading lacks, as commands that install it."""
    found = [problem for problem in check(OFFLOAD) if problem.key == "engine.offload"]
    assert rows(found) == [("engine.offload", True, ["engine.offload=false"])] * len(found)
    return [problem.hint for problem in found]


def test_offloading_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools(tmp_path, monkeypatch, "ninja")
    assert check(Config(zero=1)) == [], "only if it is asked for"
    assert missing() == ["apt-get install g++"]


def test_another_compiler_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes that of CXX."""
    tools(tmp_path, monkeypatch, "ninja", "clang++")
    monkeypatch.setenv("CXX", "clang++ -O2")
    assert check(OFFLOAD) == []
    monkeypatch.setenv("CXX", "icpx")
    assert "there is no C++ compiler (icpx)" in check(OFFLOAD)[0].message


def test_offloading_needs_ninja(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a command, or in Python's packages."""
    tools(tmp_path, monkeypatch, "c++")
    assert check(OFFLOAD) == []
    without_packages(monkeypatch)
    assert missing() == ["pip install ninja"]
    tools(tmp_path, monkeypatch, "ninja")
    assert missing() == []


def test_both_tools_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools(tmp_path, monkeypatch)
    without_packages(monkeypatch)
    assert missing() == ["apt-get install g++ and pip install ninja"]


def test_torch_gets_the_ninja_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks for a command, which an environment that is not activated does not have."""
    monkeypatch.setenv("PATH", "")
    jit_build.find_ninja()
    assert shutil.which("ninja")
    there = os.environ["PATH"]
    jit_build.find_ninja()
    assert os.environ["PATH"] == there


def asked(*overrides: str) -> list[Problem]:
    """What is known to be wrong before anything is known of the model."""
    config = compose(["engine=deepspeed", "engine.offload=true", "engine.zero=1", "mesh.pipeline=1", *overrides])
    return early(config, registry.build("engine", config.engine), Cluster(devices_per_node=2))


def test_offloading_takes_an_adam() -> None:
    found = [("optimizer.name", "sgd", ["optimizer.name=adamw", "engine.offload=false"])]
    assert rows(asked("memory=auto")) == rows(asked("memory=adam_mixed")) == found, "however memory is counted"
    for name in ("adam", "adamw"):
        assert asked("memory=sgd_fp32", f"optimizer.name={name}") == []
    assert asked("engine.offload=false") == []


def test_offloading_has_no_stages_whatever_the_model() -> None:
    """The pipeline that follows from two devices has two stages, also before the layers are known."""
    found = asked("mesh.pipeline=null", "optimizer.name=adamw")
    assert rows(found) == [("engine.offload", True, ["mesh.pipeline=1"])]


def planned(*overrides: str) -> list[Problem]:
    """What the engine has against a plan."""
    config = compose(["engine=deepspeed", "engine.offload=true", "engine.zero=1", "planner=uniform", *overrides])
    engine, planner = registry.build("engine", config.engine), registry.build("planner", config.planner)
    profile = counted(case("skips").model)
    try:
        draft(config, engine, planner, profile, Cluster(devices_per_node=2))
    except CannotRun as error:
        return list(error.problems)
    return []


def test_offloading_has_no_stages() -> None:
    found = planned("mesh.pipeline=2", "optimizer.name=adamw", "memory=sgd_fp32")
    assert rows(found) == [("engine.offload", True, ["mesh.pipeline=1"])]
    assert planned("mesh.pipeline=1", "mesh.data=2", "optimizer.name=adamw", "memory=sgd_fp32") == []
