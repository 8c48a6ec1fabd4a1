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

from engines.deepspeed import compiling
from engines.deepspeed.config import Config, build, check
from harness import registry
from harness.cluster import Cluster
from harness.compose import compose
from harness.engine_check import early
from harness.interfaces import BatchShape, Model, PlanRequest, Setting
from harness.memory import MemoryModel, named
from harness.plan import Plan
from harness.planning import draft
from harness.problem import CannotRun, Problem
from harness.profile import LayerProfile, ModelProfile
from tests.engines import contract
from tests.engines.contract import Case
from tests.engines.deepspeed.cases import case


def lines(config: Config) -> list[str]:
    """What `check` says."""
    try:
        check(config)
    except ValueError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (Config(zero=4), "engine.zero 4   is none of 0, 1, 2, 3   -> engine.zero=3"),
        (Config(checkpoint="NEVER"), "engine.checkpoint NEVER   is none of never, always   -> engine.checkpoint=never"),
        (Config(checkpoint="except_last"),
         "engine.checkpoint except_last   is none of never, always   -> engine.checkpoint=always"),
        (Config(offload=True), "engine.offload true   needs state in shards, engine.zero is 0   -> engine.zero=1"),
    ],
)  # fmt: skip
def test_values_that_no_run_can_have(config: Config, line: str) -> None:
    assert line in lines(config)


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


def test_number_formats_that_deepspeed_cannot_train() -> None:
    assert problems(case("skips")) == []
    assert problems(case("skips"), "float64") == []
    assert problems(case("skips", data=2), "float64") == ["precision.dtype float64"]
    assert problems(case("skips"), "bfloat16") == ["precision.dtype bfloat16"]
    assert problems(case("skips"), "bfloat16", zero=1) == []
    assert problems(case("skips"), "float16", zero=1) == [], "on GPUs"


@pytest.mark.parametrize(
    ("dtype", "zero", "data", "mend"),
    [
        ("float64", 1, 1, "precision=fp32, or engine.zero=0"),
        ("float64", 0, 2, "precision=fp32, or mesh.data=1"),
        ("float64", 3, 2, "precision=fp32, or engine.zero=0 mesh.data=1"),
        ("bfloat16", 0, 1, "engine.zero=1"),
        ("float16", 0, 1, "precision=fp32"),
        ("float16", 1, 2, "precision=bf16"),
    ],
)
def test_every_way_out_is_offered_and_leads_out(dtype: str, zero: int, data: int, mend: str) -> None:
    cpus = Cluster("local", 1, 2, cores=2.0)
    (problem,) = build(Config(zero=zero)).refuses(PlanRequest(BatchShape(8, 4), 1, data), dtype, cpus)
    assert (problem.key, problem.mend) == (f"precision.dtype {dtype}", mend)
    for way in mend.split(", or "):
        typed = dict(word.split("=") for word in way.split())
        dtype_then = {"fp32": "float32", "bf16": "bfloat16"}.get(typed.get("precision", ""), dtype)
        engine = build(Config(zero=int(typed.get("engine.zero", zero))))
        request = PlanRequest(BatchShape(8, 4), 1, int(typed.get("mesh.data", data)))
        assert engine.refuses(request, dtype_then, cpus) == [], way


@pytest.mark.parametrize(
    ("zero", "plan", "devices", "mend"),
    [
        (1, Plan.contiguous([7, 7], 4), 2, "mesh.data=2 mesh.pipeline=1"),
        (1, Plan.contiguous([7, 7], 4), 4, "mesh.data=2"),
        (3, Plan.contiguous([14], 4), 2, "mesh.data=2"),
        (3, Plan.contiguous([14], 4), 1, "cluster.devices=2 mesh.data=2"),
    ],
)
def test_one_replica_has_nothing_to_shard(zero: int, plan: Plan, devices: int, mend: str) -> None:
    cluster, layers = Cluster(devices_per_node=devices), ModelProfile((LayerProfile(),) * 14)
    told = Problem(f"engine.zero {zero}", "one replica: nothing to shard", mend)
    assert build(Config(zero=zero)).notes(plan, layers, cluster, MemoryModel()) == [told]
    assert build(Config(zero=0)).notes(plan, layers, cluster, MemoryModel()) == []
    shared = replace(plan, mesh=replace(plan.mesh, data=2))
    assert build(Config(zero=zero)).notes(shared, layers, cluster, MemoryModel()) == []


def test_zero_2_and_3_have_no_pipeline() -> None:
    can = build(Config(zero=2)).capabilities
    assert (can.pipeline, can.data) == (False, True)
    assert can.because["pipeline"] == Setting("engine.zero=2", "engine.zero=1")
    assert build(Config(zero=1)).capabilities.pipeline


def test_zero_needs_parameters_in_every_stage() -> None:
    """The first layer of "skips" has none."""
    bare = case("skips")
    bare = replace(bare, plan=Plan.contiguous([1, 13], 4))
    assert problems(bare) == []
    assert problems(bare, zero=1) == ["engine.zero 1"]


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
    what = f"needs deepspeed 0.19, there is {version}   -> pip install 'deepspeed>=0.19,<0.20'"
    assert lines(Config()) == [f"engine deepspeed   {what}"]
    found = registry.problems("engine", OmegaConf.structured(Config()))
    assert [problem.key for problem in found] == ["engine deepspeed"]


@pytest.mark.parametrize("version", ["0.19", "0.19.0", "0.19.12", "0.19.8+unknown"])
def test_the_version_that_it_is_made_for(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(installed(tmp_path, version))
    assert lines(Config()) == []


def test_nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    without_packages(monkeypatch)
    assert lines(Config()) == ["engine deepspeed   is not installed   -> pip install 'deepspeed>=0.19,<0.20'"]


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


def test_offloading_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools(tmp_path, monkeypatch, "ninja")
    assert lines(Config(zero=1)) == [], "only if it is asked for"
    assert lines(OFFLOAD) == [
        "engine.offload true   compiles cpu_adam, and there is no C++ compiler (c++)   "
        "-> apt-get install g++, or engine.offload=false"
    ]


def test_another_compiler_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes that of CXX."""
    tools(tmp_path, monkeypatch, "ninja", "clang++")
    monkeypatch.setenv("CXX", "clang++ -O2")
    assert lines(OFFLOAD) == []
    monkeypatch.setenv("CXX", "icpx")
    assert "there is no C++ compiler (icpx)" in lines(OFFLOAD)[0]


def test_offloading_needs_ninja(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a command, or in Python's packages."""
    tools(tmp_path, monkeypatch, "c++")
    assert lines(OFFLOAD) == []
    without_packages(monkeypatch)
    assert lines(OFFLOAD)[1:] == [
        "engine.offload true   compiles cpu_adam, and there is no ninja   -> pip install ninja, or engine.offload=false"
    ]
    tools(tmp_path, monkeypatch, "ninja")
    assert lines(OFFLOAD)[1:] == []


def test_both_tools_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools(tmp_path, monkeypatch)
    without_packages(monkeypatch)
    assert lines(OFFLOAD)[1:] == [
        "engine.offload true   compiles cpu_adam, and there is no C++ compiler (c++) and no ninja   "
        "-> apt-get install g++ and pip install ninja, or engine.offload=false"
    ]


def test_torch_gets_the_ninja_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks for a command, which an environment that is not activated does not have."""
    monkeypatch.setenv("PATH", "")
    compiling.find_ninja()
    assert shutil.which("ninja")
    there = os.environ["PATH"]
    compiling.find_ninja()
    assert os.environ["PATH"] == there


def asked(*overrides: str) -> list[Problem]:
    """What is known to be wrong before anything is known of the model."""
    config = compose(["engine=deepspeed", "engine.offload=true", "engine.zero=1", "mesh.pipeline=1", *overrides])
    return early(config, registry.build("engine", config.engine), Cluster(devices_per_node=2))


def test_offloading_takes_an_adam() -> None:
    what = "engine=deepspeed with engine.offload=true takes adamw, adam"
    mend = "optimizer.name=adamw, or engine.offload=false"
    assert asked("memory=auto") == [Problem("optimizer.name sgd", what, mend)]
    assert [p.mend for p in asked("memory=adam_mixed")] == [mend], "whatever memory is counted with"
    for name in ("adam", "adamw"):
        assert asked("memory=sgd_fp32", f"optimizer.name={name}") == []
    assert asked("engine.offload=false") == []


def test_offloading_has_no_stages_whatever_the_model() -> None:
    """The pipeline that follows from two devices has two stages, also before the layers are known."""
    (problem,) = asked("mesh.pipeline=null", "optimizer.name=adamw")
    assert (problem.key, problem.mend) == ("engine.offload true", "mesh.pipeline=1")


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
    wrong = [Problem("engine.offload true", "works without pipeline stages, there are 2", "mesh.pipeline=1")]
    assert planned("mesh.pipeline=2", "optimizer.name=adamw", "memory=sgd_fp32") == wrong
    assert planned("mesh.pipeline=1", "mesh.data=2", "optimizer.name=adamw", "memory=sgd_fp32") == []
