"""What each system cannot express, and fixes after which it can."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from harness.core.plan import Mesh
from harness.core.problem import apply
from harness.export import deepspeed, megatron, torch_pipelining, torchtitan
from harness.export.planned import Planned
from tests.harness.export.made import keys, planned

TP = ("engine=torch_pipelining", "mesh.pipeline=2", "mesh.data=1", "batch.micro_batches=4")
DS = ("engine=deepspeed", "mesh.pipeline=2", "mesh.data=1", "batch.micro_batches=4")
FEW = ("engine=pipeline", "mesh.pipeline=4", "mesh.data=1", "batch.micro_batches=2")
"""1F1B with fewer micro-batches than stages, which torch's class refuses."""
PIPE = ("engine=pipeline", "mesh.pipeline=2", "mesh.data=1", "batch.micro_batches=4")
GPIPE = ("engine=gpipe", "mesh.pipeline=2", "batch.micro_batches=4")
CASES = [
    (torch_pipelining, (*GPIPE,), ["engine.checkpoint except_last"]),
    (torch_pipelining, (*GPIPE, "engine.checkpoint=never"), []),
    (torch_pipelining, (*GPIPE, "engine.checkpoint=always"), []),
    (torch_pipelining, (*GPIPE, "engine.checkpoint=never", "engine.deferred_batch_norm=true"),
     ["engine.deferred_batch_norm true"]),
    (torch_pipelining, ("engine=fsdp", "mesh.data=2"), ["engine fsdp"]),
    (torch_pipelining, ("engine=deepspeed", "mesh.data=2", "mesh.pipeline=1", "engine.zero=2"), ["engine.zero 2"]),
    (torch_pipelining, ("engine=myelin", "mesh.pipeline=2"), ["engine myelin"]),
    (torch_pipelining, ("engine=periodic", "planner=madpipe", "mesh.pipeline=2"), ["engine periodic"]),
    (torch_pipelining, ("engine=ddp", "mesh.data=2"), []),
    (torch_pipelining, ("engine=pipeline", "planner=contiguous", "mesh.pipeline=2", "mesh.data=1"), []),
    (torch_pipelining, FEW, ["batch.micro_batches 2"]),
    (torch_pipelining, (*FEW, "batch.micro_batches=1"), []),
    (torch_pipelining, ("engine=delayed", "engine.stages=3", "batch.micro_batches=1"), ["engine delayed"]),
    (torch_pipelining, (*TP, "precision=mixed", "precision.autocast=float16", "precision.grad_scaler=true"),
     ["precision.grad_scaler true"]),
    (deepspeed, (*DS, "planner=uniform"), []),
    (deepspeed, (*DS, "planner=given", "planner.balance=[4,8]"), ["planner given"]),
    (deepspeed, (*DS, "planner=uniform", "engine.checkpoint=always"), []),
    (deepspeed, ("engine=single", "engine.checkpoint=always"), ["engine.checkpoint always"]),
    (deepspeed, (*TP, "engine.schedule=gpipe", "planner=uniform"), ["engine.schedule gpipe"]),
    (deepspeed, (*TP, "engine.schedule=1f1b", "planner=uniform"), ["engine torch_pipelining"]),
    (deepspeed, ("engine=fsdp", "mesh.data=2"), ["engine fsdp"]),
    (deepspeed, ("engine=ddp", "mesh.data=2", "precision=bf16"), ["precision.dtype bfloat16"]),
    (deepspeed, ("engine=ddp", "mesh.data=2", "precision=fp64"), ["precision.dtype float64"]),
    (torchtitan, (*TP, "model=llama", "engine.schedule=zbv"), []),
    (torchtitan, (*PIPE, "model=llama", "engine.schedule=zbv", "engine.checkpoint=always"),
     ["engine.checkpoint always"]),
    (torchtitan, (*PIPE, "model=llama", "engine.schedule=dualpipev"), ["engine pipeline"]),
    (torchtitan, (*TP, "model=gpt"), ["model gpt"]),
    (torchtitan, (*FEW, "model=llama"), ["batch.micro_batches 2"]),
    (torchtitan, (*TP, "model=llama", "model.tied=true"), ["model.tied true"]),
    (torchtitan, (*TP, "model=llama", "mesh.data=2"), ["mesh.data 2"]),
    (torchtitan, (*TP, "model=llama", "precision=mixed"), ["precision.autocast bfloat16"]),
    (torchtitan, ("engine=fsdp", "model=llama", "mesh.data=4", "precision=mixed", "batch.micro_batches=2"), []),
    (torchtitan, ("engine=single", "model=llama", "precision=fp64"), ["precision.dtype float64"]),
    (megatron, (*TP, "model=unet", "engine.schedule=1f1b"), ["model unet"]),
    (megatron, (*TP, "model=gpt", "engine.schedule=gpipe"), ["engine.schedule gpipe"]),
    (megatron, (*TP, "model=gpt", "engine.schedule=zbv"), ["engine.schedule zbv"]),
    (megatron, (*TP, "model=gpt", "engine.schedule=1f1b"), []),
    (megatron, (*FEW, "model=gpt"), []),
    (megatron, (*TP, "model=gpt", "engine.schedule=1f1b", "planner=given", "planner.balance=[1,11]"),
     ["planner given"]),
    (megatron, (*FEW, "model=gpt", "batch.micro_batches=8", "engine.schedule=interleaved1f1b", "planner=uniform"),
     ["planner uniform"]),
    (megatron, ("engine=fsdp", "model=gpt", "mesh.data=2"), ["engine fsdp"]),
    (megatron, ("engine=deepspeed", "model=gpt", "mesh.data=2", "mesh.pipeline=1", "engine.zero=2"),
     ["engine.zero 2"]),
    (megatron, (*TP, "model=gpt", "engine.schedule=1f1b", "precision=mixed"), ["precision.autocast bfloat16"]),
    (megatron, (*TP, "model=gpt", "engine.schedule=1f1b", "precision=bf16"), ["precision.dtype bfloat16"]),
]  # fmt: skip


@pytest.mark.parametrize(("system", "overrides", "refused"), CASES)
def test_what_a_system_cannot_express_is_refused(
    system: ModuleType, overrides: tuple[str, ...], refused: list[str]
) -> None:
    assert keys(system.refused(planned(*overrides))) == refused


@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize(("system", "overrides"), [case[:2] for case in CASES if case[2]])
def test_after_the_first_fix_of_each_problem_it_is_not(system: ModuleType, overrides: tuple[str, ...]) -> None:
    for problem in system.refused(planned(*overrides)):
        fixed = apply(overrides, problem.fixes[0])
        if problem.key == "engine":  # its keys go with it, as the printed fix says
            fixed = [text for text in fixed if not text.startswith("engine.") or text in apply([], problem.fixes[0])]
        assert problem.key not in [one.key for one in system.refused(planned(*fixed))]


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ("0F0,0F1,0B0,0R1,0B1\n1F0,1B0,1F1,1B1\n", ["engine.schedule {}"]),
        ("0F0,0F1,0R0,0B0,0R1,0B1\n1F0,1R0,1B0,1F1,1R1,1B1\n", []),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", []),
    ],
)
def test_a_file_that_recomputes_some_passes_only(rows: str, found: list[str], tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text(rows)
    keys_ = ("engine=pipeline", "mesh.pipeline=2", "mesh.data=1", "batch.micro_batches=2", "model=gpt")
    one = planned(*keys_, f"engine.schedule={file}")
    for system in (torch_pipelining, megatron):
        problems = system.refused(one)
        assert keys(problems) == [text.format(file) for text in found]
        for fix in (fix for problem in problems for fix in problem.fixes):
            assert system.refused(planned(*apply(keys_, fix))) == []


def split(planned: Planned, **strategy: tuple[int, ...]) -> Planned:
    """The plan with matmuls that two devices split."""
    named = {name.replace("__", "."): numbers for name, numbers in strategy.items()}
    return replace(planned, plan=replace(planned.plan, mesh=Mesh(tensor=2), strategy=named))


def test_matmuls_are_split_as_megatron_splits_them() -> None:
    one = planned("engine=single", "model=gpt")
    rows, columns = (1, 1, 2), (1, 2, 1)
    right = {"embedding": rows, "block_0__attention__qkv": columns, "block_0__mlp__down": rows, "head": columns}
    assert not megatron.refused(split(one, **right))
    assert not megatron.refused(split(one, head=(1, 1, 1, 2, 1, 1))), "over nodes and devices"
    for name, wrong in (("head", rows), ("block_0__mlp__down", columns), ("embedding", (2, 1, 1))):
        assert keys(megatron.refused(split(one, **right | {name: wrong}))) == ["planner balance"]
    assert "mesh.tensor 2" in keys(torch_pipelining.refused(split(one, **right)))
    assert "mesh.tensor 2" in keys(deepspeed.refused(split(one, **right)))
