"""Names of other frameworks are suggested as keys of this project, with values that mean the same."""

import pytest

from harness.cli.compose import compose
from harness.core.problem import CannotRun
from harness.host import devices
from harness.host.devices import DetectedDevices
from tests.problems import fixes, refused


@pytest.fixture(autouse=True)
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    here = DetectedDevices("cpu", "a CPU", 2, 16 * 10**9)
    monkeypatch.setattr(devices, "detect", lambda wanted="auto": here)


def suggested(*overrides: str) -> list[str]:
    """The fixes of each problem, or its hint, without the key that was typed."""
    with pytest.raises(CannotRun) as caught:
        compose(overrides)
    return [
        ", or ".join(fix.partition(" without ")[0] for fix in fixes(problem)) or problem.hint
        for problem in refused(caught)
    ]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("micro_batch_size=2", "batch.micro_batch_size=2"),
        ("micro_batch_size=2 engine=ddp", "batch.micro_batch_size=2"),
        ("micro_batch_size=3 batch.size=15 engine=ddp", "batch.micro_batch_size=3 batch.size=12"),
        ("engine.chunks=8", "batch.micro_batches=8"),
        ("batch_size=32", "batch.size=32"),
        ("batchsize=32", "batch.size=32"),
        ("batch_size=30", "batch.size=30 batch.micro_batches=10"),
        ("+batch_size=32", "batch.size=32"),
        ("tensor_model_parallel_size=2", "planner=megatron mesh.tensor=2"),  # which brings engine=sbp
        ("engine=gpipe tp=2", "planner=megatron mesh.tensor=2 engine=sbp"),
        ("tp=2 engine=sbp planner=autoddl", "mesh.tensor=2"),
        ("pp=2", "mesh.pipeline=2"),
        ("dp=2", "engine=ddp mesh.data=2"),
        ("engine.balance=[54,55]", "planner=given planner.balance=[54,55]"),
        ("engine=single balance=[54,55]", "planner=given planner.balance=[54,55] engine=gpipe"),
        ("learning_rate=0.1", "optimizer.lr=0.1"),
        ("num_layers=3 model=gpt", "model.layers=3"),
        ("num_layers=3", "model.layers of model=amoebanet or model=gpt or model=llama"),
        ("hidden_size=128 model=gpt", "model.hidden=128"),
        ("hidden_size=128 model=llama", "model.width=128"),
        ("hidden_size=128", "model.hidden of model=gpt, or model.width of model=llama"),
        ("num_key_value_heads=4 model=llama", "model.kv_heads=4"),
        ("zero_stage=3", "engine=deepspeed engine.zero=3"),
        ("zero_stage=3 engine=deepspeed engine.checkpoint=always", "engine.zero=3"),
        ("world_size=2", "cluster.devices=2"),
        ("world_size=6 cluster=gcp_a100 cluster.nodes=3 mode=simulate", "cluster.devices=2"),
        ("nproc_per_node=6 cluster=gcp_a100 cluster.nodes=3 mode=simulate", "cluster.devices=6"),
        ("lr=abc", "optimizer.lr=..., but optimizer.lr abc is not a number"),
        ("batch_size=true", "batch.size=..., but batch.size true is not a whole number"),
    ],
)
def test_a_key_of_another_framework(typed: str, meant: str) -> None:
    assert suggested(*typed.split()) == [meant]


@pytest.mark.parametrize(
    "typed",
    [
        "micro_batch_size=3",
        "micro_batch_size=0",
        "micro_batch_size=true",
    ],
)
def test_a_size_that_divides_no_batch_has_a_hint_and_no_fix(typed: str) -> None:
    with pytest.raises(CannotRun) as caught:
        compose(typed.split())
    (problem,) = refused(caught)
    assert problem.hint and not problem.fixes


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (
            "micro_batch_size=4 global_batch_size=32 dp=2",
            ["batch.micro_batch_size=4", "batch.size=32", "engine=ddp mesh.data=2"],
        ),
        (
            "tp=2 zero_stage=1",
            ["planner=megatron mesh.tensor=2 mode=simulate cluster=summit", "engine=deepspeed engine.zero=1"],
        ),
        ("dp=2 zero_stage=2", ["mesh.data=2", "engine=deepspeed engine.zero=2"]),
        ("pp=2 dp=2", ["mesh.pipeline=2", "engine=torch_pipelining mesh.data=2 cluster.devices=4"]),
        ("tp=2 pp=2", ["planner=megatron mesh.tensor=2", "mesh.pipeline=2 cluster.devices=4"]),
        ("lr=0.3 steps=0", ["optimizer.lr=0.3", "steps=1"]),
        (
            "chunks=8 micro_batch_size=4",
            [
                "batch.micro_batches=8",
                "batch.micro_batch_size=..., but batch.micro_batch_size 4 is given, and so is batch.micro_batches=8",
            ],
        ),
    ],
)
def test_several_keys_are_understood_together(typed: str, meant: list[str]) -> None:
    assert suggested(*typed.split()) == meant


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("engine=zero3", "engine=deepspeed engine.zero=3"),
        ("engine=ZeRO-3", "engine=deepspeed engine.zero=3"),
        ("engine=zero", ", or ".join(f"engine=deepspeed engine.zero={stage}" for stage in (1, 2, 3))),
        ("engine=megatron", "engine=sbp planner=megatron"),
        ("engine=pipedream", "engine=periodic planner=pipedream engine.versions=stash"),
        ("engine=pipedream_2bw", "engine=periodic planner=pipedream"),
        ("engine=dp", "engine=ddp"),
        ("engine=1f1b", "engine=pipeline engine.schedule=1f1b, or engine=torch_pipelining engine.schedule=1f1b"),
        ("engine=madpipe", "planner=madpipe"),
        ("planner=gpipe", "engine=gpipe"),
    ],
)
def test_an_engine_of_another_framework_and_a_choice_of_another_group(typed: str, meant: str) -> None:
    assert suggested(typed) == [meant]
