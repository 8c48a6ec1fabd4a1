"""What is written for each system, read as the system reads it."""

from __future__ import annotations

import ast
import math
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from harness.cli.compose import compose
from harness.core.problem import CannotRun
from harness.export import deepspeed, deepspeed_config, megatron, systems, torch_pipelining, torchtitan
from harness.export.planned import Planned
from tests.harness.export.made import names, planned

LOOPED = (
    "engine=torch_pipelining",
    "engine.schedule=interleaved1f1b",
    "mesh.pipeline=2",
    "mesh.data=1",
    "batch.micro_batches=4",
)
DEEPSPEED = [
    ("engine=deepspeed", "mesh.pipeline=2", "mesh.data=2", "planner=uniform", "engine.checkpoint=always"),
    ("engine=deepspeed", "mesh.pipeline=1", "mesh.data=4", "batch.micro_batches=2", "engine.zero=3"),
    ("engine=deepspeed", "mesh.pipeline=1", "mesh.data=2", "engine.zero=2", "precision=bf16"),
    ("engine=ddp", "mesh.data=2", "precision=mixed"),
]


@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize("overrides", DEEPSPEED)
def test_deepspeed_takes_its_file(overrides: tuple[str, ...]) -> None:
    one = planned(*overrides)
    assert not deepspeed.refused(one)
    settings, data = deepspeed.settings(one), one.plan.mesh.data
    deepspeed_config.check(settings, data)
    with pytest.raises(AssertionError, match="train_batch_size is not equal"):
        deepspeed_config.check(settings, data + 1)


def test_what_deepspeed_reads() -> None:
    piped, zero3, bf16, mixed = (deepspeed.settings(planned(*overrides)) for overrides in DEEPSPEED)
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [piped[key] for key in batch] == [16, 1, 8] and [zero3[key] for key in batch] == [16, 2, 2]
    assert piped["pipeline"] == {"stages": 2, "partition": "parameters", "activation_checkpoint_interval": 6}
    assert [one["zero_optimization"]["stage"] for one in (piped, zero3, bf16, mixed)] == [0, 3, 2, 0]
    assert bf16["bf16"] == {"enabled": True} and "pipeline" not in bf16
    assert mixed["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}


def test_ranks_of_a_pipeline_are_neighbors_in_deepspeed() -> None:
    """As in the plan; DeepSpeed's own topology has the replicas of a stage side by side."""
    from deepspeed.runtime.pipe import topology

    one = planned(*DEEPSPEED[0])
    (call,) = re.findall(r"topology=(ProcessTopology\(.*?\)), ", deepspeed.note(one))
    made = eval(call, vars(topology))
    assert made.get_axis_list("data", 0) == [0, 1] and made.get_dim("pipe") == 2
    assert "num_stages=2" in deepspeed.note(planned(*DEEPSPEED[0], "mesh.data=1"))


@pytest.mark.usefixtures("commands")
def test_what_deepspeed_refuses_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    one = planned(*DEEPSPEED[0])
    wrong = {**deepspeed.settings(one), "train_batch_size": 17}
    monkeypatch.setattr(deepspeed, "settings", lambda planned: wrong)
    (problem,) = deepspeed.invalid(one, "ds.json")
    assert problem.subject == "export ds.json" and "train_batch_size is not equal" in problem.message


def flags(one: Planned, tmp_path: Path) -> dict[str, str]:
    """As Bash reads the file."""
    file = tmp_path / "plan.sh"
    file.write_text(megatron.text(one))
    done = subprocess.run(
        ["bash", "-c", f'source {file}; printf "%s\\n" "${{PLAN[@]}}"'], capture_output=True, text=True
    )
    found: dict[str, str] = {}
    for word in done.stdout.splitlines():
        if word.startswith("--"):
            found[word], last = "", word
        else:
            found[last] = word
    return found


def layers(layout: str) -> list[int]:
    """Transformer layers of each stage of a layout: Megatron-LM's 'Et|tt|L'."""
    assert layout[0] == "E" and layout[-1] == "L" and layout.count("E") == layout.count("L") == 1
    return [stage.count("t") for stage in layout.split("|")]


def test_megatron_flags(tmp_path: Path) -> None:
    even = (*LOOPED, "model=gpt", "mesh.data=2", "batch.micro_batches=2", "planner=given")
    found = flags(planned(*even, "planner.balance=[4,2,2,4]"), tmp_path)
    assert found == {
        "--num-layers": "8", "--tensor-model-parallel-size": "1", "--pipeline-model-parallel-size": "2",
        "--num-layers-per-virtual-pipeline-stage": "2", "--micro-batch-size": "4", "--global-batch-size": "16",
        "--use-tp-pp-dp-mapping": "",
    }  # fmt: skip
    other = flags(planned(*even, "planner.balance=[2,5,3,2]"), tmp_path)
    assert layers(other["--pipeline-model-parallel-layout"]) == [0, 5, 3, 0]
    assert "--num-layers-per-virtual-pipeline-stage" not in other
    pipe = ("engine=deepspeed", "mesh.pipeline=2", "mesh.data=2", "engine.zero=1", "precision=bf16", "model=llama")
    for one in (("engine=ddp", "mesh.data=2", "model=gpt"), (*LOOPED, "model=gpt")):  # ranks in one order only
        assert "--use-tp-pp-dp-mapping" not in flags(planned(*one), tmp_path)
    once = flags(planned(*pipe, "engine.checkpoint=always", "planner=given", "planner.balance=[5,6]"), tmp_path)
    assert once.keys() >= {"--bf16", "--use-distributed-optimizer", "--untie-embeddings-and-output-weights"}
    assert (once["--recompute-granularity"], once["--recompute-method"]) == ("full", "uniform")
    assert once["--recompute-num-layers"] == "4" and "--pipeline-model-parallel-layout" not in once


def test_torchtitan_file() -> None:
    one = planned(*LOOPED, "model=llama", "planner=given", "planner.balance=[2,3,5,1]")
    found = tomllib.loads(torchtitan.text(one))
    degrees = [found["parallelism"][f"{name}_degree"] for name in (
        "data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "pipeline_parallel")]  # fmt: skip
    assert degrees == [1, 1, 1, 2] and math.prod(degrees) == one.plan.mesh.size
    parts = found["parallelism"]["module_fqns_per_model_part"]
    assert [len(part) for part in parts] == [2, 3, 5, 1] and parts[-1] == ["output"]
    whole = [name for part in parts for name in part]
    assert whole == ["tok_embeddings", *(f"layers.{number}" for number in range(8)), "norm", "output"]
    assert found["parallelism"]["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert (found["training"]["local_batch_size"], found["training"]["global_batch_size"]) == (16, 16)
    assert found["parallelism"]["pipeline_parallel_microbatch_size"] == 4
    sharded = ("engine=fsdp", "model=llama", "mesh.data=4", "batch.micro_batches=2", "precision=mixed")
    shards = tomllib.loads(torchtitan.text(planned(*sharded, "engine.reshard_after_forward=false")))
    assert shards["parallelism"]["data_parallel_shard_degree"] == 4
    assert shards["parallelism"]["fsdp_reshard_after_forward"] == "never"
    assert shards["training"]["local_batch_size"] == 2, "a micro-batch: its gradients are accumulated"
    assert shards["training"]["mixed_precision_param"] == "bfloat16"


@pytest.mark.parametrize(("model", "flavor"), [("llama3_8b", "8B"), ("llama3_70b", "70B"), ("llama", None)])
def test_torchtitan_is_given_the_flavor_of_the_model_or_its_sizes(model: str, flavor: str | None) -> None:
    layers = names("llama", {"8B": 32, "70B": 80, None: 8}[flavor])
    keys = ("engine=fsdp", f"model={model}", "mesh.data=4", "batch.micro_batches=2", "cluster.memory_gb=4000")
    one = planned(*keys, layers=layers)
    text = torchtitan.text(one)
    assert tomllib.loads(text)["model"] == {"name": "llama3", **({"flavor": flavor} if flavor else {})}
    assert ("register one" in text) == (flavor is None) == ("--model.flavor" in torchtitan.note(one))
    assert flavor or "layers=4, width=64, heads=4, kv_heads=2, hidden=176, vocabulary=256" in text
    other = planned(*keys, "model.rope_theta=7", layers=layers)
    assert torchtitan.flavor(other) == ""


def constants(one: Planned) -> dict[str, Any]:
    """What the script sets before its first function."""
    found: dict[str, Any] = {}
    for node in ast.parse(torch_pipelining.text(one)).body:
        if isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = ast.literal_eval(node.value)
    return found


def test_the_script_has_the_plan() -> None:
    one = planned(*LOOPED, "model=gpt", "seed=3", "steps=4", "warmup=1", "optimizer.name=adamw")
    found = constants(one)
    assert found["STAGES"] == [(s.first, s.last, s.device) for s in one.plan.stages]
    assert found["SCHEDULE"] == "Interleaved1F1B" and found["(SEED, STEPS)"] == (3, 5)
    assert found["(DATA, PIPELINE, MICRO_BATCHES, BATCH)"] == (1, 2, 4, 16)
    assert found["OPTIMIZER"]["name"] == "adamw" and found["CHOSEN"]["model"]["name"] == "gpt"
    assert constants(planned("engine=gpipe", "engine.checkpoint=always", "mesh.pipeline=2"))["RECOMPUTE"] is True
    few = ("engine=pipeline", "mesh.pipeline=2", "mesh.data=1", "batch.micro_batches=1")
    assert constants(planned(*few))["SCHEDULE"] == "GPipe", "torch's 1F1B takes no fewer micro-batches than stages"
    assert len(names("gpt")) == one.plan.stages[-1].last + 1


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("gone/ds.json", "is in {}/gone, which is missing"),
        ("here.json", "is there already"),
        ("here.json/ds.json", "is in {}/here.json, which is a file"),
        ("folder.json", "is a folder"),
        ("plan.txt", "says no system"),
        ("plan", "says no system"),
        ("a" * 300 + ".json", "cannot be written: File name too long"),
    ],
)
def test_places_that_no_file_can_have(tmp_path: Path, file: str, said: str) -> None:
    (tmp_path / "here.json").write_text("{}")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(CannotRun) as caught:
        planned("engine=ddp", "mesh.data=2", f"export='{tmp_path / file}'")
    (problem,) = caught.value.problems
    assert problem.key == "export" and said.format(tmp_path) in problem.message


@pytest.mark.parametrize(("file", "model"), [("plan.toml", "gpt"), ("plan.sh", "unet")])
def test_a_model_of_another_system_is_refused_at_once(tmp_path: Path, file: str, model: str) -> None:
    with pytest.raises(CannotRun) as caught:
        compose(["mode=plan", f"model={model}", f"export='{tmp_path / file}'"])
    (problem,) = caught.value.problems
    assert problem.key == "model" and problem.fixes[-1] == {"model": "llama"}


def test_a_folder_that_cannot_be_written() -> None:
    with pytest.raises(CannotRun, match="cannot be written"):
        planned("engine=ddp", "mesh.data=2", "export=/proc/plan.json")


def test_export_is_for_plans_and_replaces_when_asked(tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match="is written by mode=plan alone"):
        planned("engine=ddp", "mesh.data=2", f"export={tmp_path / 'a.json'}", "mode=simulate")
    (tmp_path / "a.json").write_text("mine")
    one = planned("engine=ddp", "mesh.data=2", f"export={tmp_path / 'a.json'}", "overwrite=true")
    assert "DeepSpeed" in systems.write(one) and (tmp_path / "a.json").read_text().startswith("{")
    one.config.overwrite = False  # it has appeared since the request was checked
    with pytest.raises(CannotRun, match="is there already"):
        systems.write(one)
