import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from harness.checks import plan_fits, profile_match, request
from harness.checks.mesh import micro_batch, resolve
from harness.core.cluster import Cluster, Device
from harness.core.memory_model import MemoryModel
from harness.core.model_profile import LayerProfile, ModelProfile, Skip, Unsplit
from harness.core.plan import Mesh, Plan, Stage
from harness.core.problem import deduplicate, typed
from harness.host.devices import DetectedDevices
from harness.interfaces import Capabilities, Setting
from tests.problems import fixes, keys, rows

PIPELINE = Capabilities()
SINGLE = Capabilities(pipeline=False)
EVERYTHING = Capabilities(data=True, tensor=True)
EIGHT = Cluster(devices_per_node=8)


def config(**changes):
    """A configuration with what the checks look at; keys like batch_size stand for batch.size."""
    made = OmegaConf.create(
        {
            "engine": {"name": "gpipe", "checkpoint": "never"},
            "model": {"name": "unet"},
            "planner": {"name": "balance"},
            "cluster": {"name": "local", "device": "cpu", "slow_device": [], "peak_tflops": {"bfloat16": None}},
            "precision": {
                "dtype": "float32",
                "autocast": None,
                "channels_last": False,
                "compile": False,
                "grad_scaler": False,
                "cuda_graphs": False,
            },
            "launch": {"sharded_checkpoints": False},
            "optimizer": {"name": "sgd", "fused": False},
            "mesh": {"data": None, "pipeline": None, "tensor": None},
            "batch": {"size": 512, "micro_batches": 8},
            "mode": "run",
            "costs": "auto",
            "profile": None,
        }
    )
    for key, value in changes.items():
        OmegaConf.update(made, key.replace("__", "."), value)
    return made


def test_a_run_without_problems():
    assert request.request(config(), PIPELINE, EIGHT) == []


def test_this_machines_devices_are_as_fast_as_they_are():
    assert rows(request.request(config(cluster__slow_device=[1]), PIPELINE, EIGHT)) == [
        ("cluster.slow_device", [1], ["mode=simulate", "cluster.slow_device=[]"])
    ]
    assert not request.request(config(cluster__slow_device=[1], mode="simulate"), PIPELINE, EIGHT)


def test_all_problems_at_once_in_a_fixed_order():
    wrong = config(
        mesh__pipeline=16, mesh__tensor=2, batch__micro_batches=7, cluster__name="flat", precision__dtype="float16"
    )
    assert rows(request.request(wrong, PIPELINE, EIGHT)) == [
        ("mesh.tensor", 2, ["mesh.tensor=1"]),
        ("mesh.pipeline", 16, ["mesh.pipeline=8"]),
        ("batch.micro_batches", 7, ["batch.micro_batches=8", "batch.micro_batches=4"]),
        ("cluster", "flat", ["mode=simulate", "cluster=local"]),
        ("precision.dtype", "float16", ["precision.dtype=float32", "precision=mixed"]),
    ]


def test_a_cluster_that_is_wrong_itself_does_not_hide_the_rest():
    found = request.request(config(mesh__pipeline=16, batch__micro_batches=7), PIPELINE, None)
    assert keys(found) == ["batch.micro_batches"]


def test_several_degrees_need_their_product():
    found = request.request(config(mesh__data=2, mesh__pipeline=8), EVERYTHING, EIGHT)
    assert rows(found) == [("mesh.pipeline", 8, ["mesh.pipeline=4", "cluster.devices=16"])]
    assert "mesh.data 2" in found[0].message, "the other key that is to blame"
    described = config(mesh__data=2, mesh__pipeline=8, cluster__name="flat", mode="plan")
    found = request.request(described, EVERYTHING, EIGHT)
    assert rows(found) == [("mesh.pipeline", 8, ["mesh.pipeline=4"])], "it is what it is"


def test_more_gpus_than_there_are_cannot_be_had(monkeypatch):
    monkeypatch.setattr(request.devices, "detect", lambda wanted: DetectedDevices("cuda", "a GPU", 8, 80))
    (found,) = request.request(config(mesh__pipeline=16), PIPELINE, EIGHT)
    assert fixes(found) == ["mesh.pipeline=8"]


@pytest.mark.parametrize(
    ("size", "data", "count", "right"),
    [(512, 1, 7, [8, 4]), (16, 1, 32, [16]), (12, 1, 5, [6, 4]), (12, 2, 4, [3, 6]), (7, 1, 3, [1, 7])],
)
def test_the_nearest_micro_batches_that_divide(size, data, count, right):
    found = request.request(config(batch__size=size, batch__micro_batches=count, mesh__data=data), EVERYTHING, EIGHT)
    assert [problem.fixes for problem in found] == [tuple({"batch.micro_batches": number} for number in right)]


@given(st.integers(1, 300), st.integers(1, 310))
def test_the_fixes_of_micro_batches_against_brute_force(size, count):
    found = request.request(config(batch__size=size, batch__micro_batches=count), PIPELINE, EIGHT)
    if size % count == 0:
        assert found == []
        return
    right = [fix["batch.micro_batches"] for fix in found[0].fixes]
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    assert abs(right[0] - count) == min(abs(d - count) for d in divisors)
    assert set(right) == {*[d for d in divisors if d < count][-1:], *[d for d in divisors if d > count][:1]}


@pytest.mark.parametrize(
    ("size", "data", "count", "right"), [(15, 2, 8, 16), (17, 2, 8, 16), (16, 7, 8, 56), (1, 2, 8, 16), (90, 7, 8, 112)]
)
def test_replicas_share_the_batch_equally(size, data, count, right):
    """In as many micro-batches."""
    found = request.request(config(batch__size=size, batch__micro_batches=count, mesh__data=data), EVERYTHING, EIGHT)
    assert rows(found) == [("batch.size", size, [f"batch.size={right}"])]


@given(st.integers(1, 60), st.integers(1, 12), *[st.sampled_from([None, 1, 2, 3, 5, 7])] * 3, st.integers(1, 6))
def test_what_is_offered_together_is_enough_together(size, count, data, pipeline, tensor, devices):
    typed = {"batch__size": size, "batch__micro_batches": count, "mesh__data": data, "mesh__pipeline": pipeline,
             "mesh__tensor": tensor}  # fmt: skip
    found = request.request(config(**typed), EVERYTHING, Cluster(devices_per_node=devices))
    for chosen in itertools.product(*(problem.fixes for problem in found)):
        fixed = config(**typed, cluster__devices=devices)
        for fix in chosen:
            for key, number in fix.items():
                OmegaConf.update(fixed, key, number)
        assert request.request(fixed, EVERYTHING, Cluster(devices_per_node=fixed.cluster.devices)) == [], chosen


@pytest.mark.parametrize(
    ("data", "can", "cluster", "right"),
    [(2, PIPELINE, EIGHT, ["mesh.data=1"]),
     (4, EVERYTHING, Cluster(devices_per_node=2), ["mesh.data=2", "cluster.devices=4 batch.size=32"])],
)  # fmt: skip
def test_micro_batches_are_judged_by_the_replicas_that_there_will_be(data, can, cluster, right):
    """8 divide a batch of 16 for one replica and for two, not for four; 12 divide one of 12 for one replica only."""
    batch = (
        {"batch__size": 16, "batch__micro_batches": 8} if data == 4 else {"batch__size": 12, "batch__micro_batches": 12}
    )
    found = request.request(config(mesh__data=data, **batch), can, cluster)
    assert [fixes(problem) for problem in found] == [right], "one cause, one problem"


def test_a_setting_of_the_engine_that_is_in_the_way_is_offered_to_be_changed():
    can = Capabilities(
        dtypes=("float32",), optimizers=("adamw", "adam"), pipeline=False,
        disabled_by={"pipeline": Setting({"engine.zero": 2}, {"engine.zero": 1}),
                     "optimizers": Setting({"engine.offload": True}, {"engine.offload": False})},
    )  # fmt: skip
    assert rows(request.request(config(mesh__pipeline=2, precision__dtype="float64"), can, EIGHT)) == [
        ("mesh.pipeline", 2, ["mesh.pipeline=1", "engine.zero=1"]),
        ("precision.dtype", "float64", ["precision.dtype=float32"]),
        ("optimizer.name", "sgd", ["optimizer.name=adamw", "engine.offload=false"]),
    ]
    assert request.request(config(optimizer__name="adam"), can, EIGHT) == []


def test_a_fused_kernel_that_an_engine_does_not_have():
    can = Capabilities(fused=("adam",))
    assert rows(request.request(config(optimizer__fused=True), can, EIGHT)) == [
        ("optimizer.fused", True, ["optimizer.fused=false"])
    ]
    assert request.request(config(optimizer__fused=True, optimizer__name="adam"), can, EIGHT) == []
    assert request.request(config(optimizer__fused=False), can, EIGHT) == []


def test_planning_for_a_described_cluster_is_fine():
    assert request.request(config(cluster__name="flat", mode="plan"), PIPELINE, EIGHT) == []


@pytest.mark.parametrize(
    ("given_degrees", "can", "layers", "mesh"),
    [
        ({}, PIPELINE, 100, Mesh(pipeline=8)),
        ({}, PIPELINE, 5, Mesh(pipeline=5)),
        ({}, SINGLE, 100, Mesh()),
        ({"pipeline": 3}, PIPELINE, 100, Mesh(pipeline=3)),
        ({"data": 2}, EVERYTHING, 100, Mesh(data=2, tensor=4)),
        ({"pipeline": 2}, EVERYTHING, 100, Mesh(pipeline=2, tensor=4)),
        ({"data": 2, "pipeline": 2, "tensor": 2}, EVERYTHING, 100, Mesh(2, 2, 2)),
        ({}, Capabilities(pipeline=False, tensor=True), 100, Mesh(tensor=8)),
        ({}, Capabilities(pipeline=False, data=True), 100, Mesh(data=8)),
        # what cannot be is cut down, so that the other checks can continue
        ({"pipeline": 16}, PIPELINE, 100, Mesh(pipeline=8)),
        ({"data": 2}, PIPELINE, 100, Mesh(pipeline=8)),
    ],
)
def test_a_degree_that_is_not_given_follows_from_the_rest(given_degrees, can, layers, mesh):
    changes = {f"mesh__{name}": degree for name, degree in given_degrees.items()}
    assert resolve(config(**changes), can, 8, layers) == mesh


def test_micro_batch():
    assert micro_batch(config(batch__size=512, batch__micro_batches=8)) == 64
    assert micro_batch(config(batch__size=512, batch__micro_batches=8, mesh__data=2)) == 32
    assert micro_batch(config(batch__size=4, batch__micro_batches=7)) == 1


def profile_of(layers: int = 5, **fields) -> ModelProfile:
    return ModelProfile((LayerProfile(),) * layers, **{"model": "unet_2_16_128", "micro_batch": 64} | fields)


def against(found: ModelProfile, can: Capabilities = PIPELINE, model_given: bool = True, **changes):
    return rows(profile_match.against_profile(config(**changes), can, found, 8, model_given))


WHY = Unsplit("net.py", 12, "if x.sum() > 0:", "it reads the value of a tensor")


@pytest.mark.parametrize(
    ("can", "changes", "wanted"),
    [
        (PIPELINE, {}, ["engine=single", "mesh.pipeline=1"]),
        (PIPELINE, {"mesh__pipeline": 2}, ["engine=single mesh.pipeline=1", "mesh.pipeline=1"]),
        (Capabilities(data=True), {"mesh__data": 2}, ["mesh.pipeline=1", "engine=single"]),
        (
            PIPELINE,
            {"planner": {"name": "given", "balance": [1, 1]}},
            ["engine=single mesh.pipeline=1 planner=balance", "mesh.pipeline=1 planner=balance"],
        ),
    ],
)
def test_a_model_that_cannot_be_split_takes_no_pipeline(can: Capabilities, changes: dict, wanted: list[str]):
    """Whether the user says the number of stages or not; the line that prevents them is named."""
    (found,) = profile_match.against_profile(config(**changes), can, profile_of(1, unsplit=WHY), 8, True)
    assert found.message == "cannot be split into stages: net.py:12, `if x.sum() > 0:`: it reads the value of a tensor"
    assert [typed(fix) for fix in found.fixes] == wanted


def test_an_engine_that_must_know_its_messages_before_is_no_fix_for_a_model_that_chooses_by_values():
    can, whole = Capabilities(pipeline=True, data=True, by_value=False), profile_of(1, unsplit=WHY, by_value=WHY.text)
    (found,) = profile_match.against_profile(config(mesh__pipeline=2), can, whole, 8, True)
    assert [typed(fix) for fix in found.fixes] == ["engine=single mesh.pipeline=1"]


@pytest.mark.parametrize(
    ("can", "changes"), [(SINGLE, {}), (PIPELINE, {"mesh__pipeline": 1}), (Capabilities(data=True), {"mesh__data": 8})]
)
def test_a_model_that_cannot_be_split_takes_one_stage(can: Capabilities, changes: dict):
    assert not profile_match.against_profile(config(**changes), can, profile_of(1, unsplit=WHY), 8, True)
    assert not profile_match.against_profile(config(), PIPELINE, profile_of(1), 8, True), "it is one layer"


def test_more_stages_than_layers():
    assert against(profile_of(), mesh__pipeline=16) == [
        ("mesh.pipeline", 16, ["mesh.pipeline=5"]),
    ]


def test_an_engine_without_skips():
    found = against(profile_of(skips=(Skip(0, 4, 8, "s"),)), Capabilities(skips=False))
    assert found == [("model", "unet_2_16_128", ["engine=gpipe"])]


def test_a_profile_that_was_measured_needs_no_comparison():
    assert against(profile_of(model="anything", micro_batch=1)) == []


def test_a_profile_for_another_model():
    for mode, right in (("run", ["without profile"]), ("plan", ["without model", "without profile"])):
        found = against(profile_of(model="gpt_12"), profile="p.json", mode=mode)
        assert found == [("profile", "p.json", right)], "without a model a profile is for planning"
    assert against(profile_of(), profile="p.json") == []
    assert against(profile_of(model="unet"), profile="p.json") == []


def test_without_a_model_only_planning_is_possible():
    found = against(profile_of(model="gpt_12"), model_given=False, profile="p.json")
    assert found == [("profile", "p.json", ["mode=simulate"])]
    assert against(profile_of(model="gpt_12"), model_given=False, profile="p.json", mode="plan") == []


def test_a_profile_for_other_micro_batches_or_another_dtype():
    other = profile_of(micro_batch=2, dtype="float64")
    samples = ("profile", "p.json", ["batch.micro_batches=256", "batch.size=16"])
    assert against(other, profile="p.json") == [samples, ("profile", "p.json", ["precision.dtype=float64"])]
    found = against(other, profile="p.json", mode="plan")
    assert found == [samples], "times of other micro-batches predict nothing; a plan for another dtype may be wanted"


@pytest.mark.parametrize(
    ("size", "data", "right"),
    [
        (512, None, ["batch.micro_batches=256", "batch.size=16"]),
        (512, 2, ["batch.micro_batches=128", "batch.size=32"]),
        (6, 2, ["batch.size=32"]),
        (1, None, ["batch.size=16"]),
        (17, None, ["batch.size=16"]),
    ],
)
def test_as_many_micro_batches_of_a_profile_as_the_batch_holds(size, data, right):
    typed = {"profile": "p.json", "mode": "plan", "batch__size": size, "mesh__data": data}
    assert [row[2] for row in against(profile_of(micro_batch=2), **typed)] == [right]


def test_all_that_a_profile_and_the_request_differ_in_is_reported_at_once():
    other = profile_of(model="gpt_12", micro_batch=2, dtype="float64")
    samples = ["batch.micro_batches=256", "batch.size=16"]
    found = [right for _, _, right in against(other, profile="p.json")]
    assert found == [["without profile"], samples, ["precision.dtype=float64"]]
    found = [right for _, _, right in against(other, profile="p.json", mode="plan")]
    assert found == [["without model", "without profile"], samples]


def stated(balance, cluster, devices="cpu", **changes):
    """What is said of stages that are given one by one: before a plan, and of the plan."""
    asked = config(
        planner={"name": "given", "balance": balance}, mesh__pipeline=len(balance), cluster__device=devices, **changes
    )
    before = request.request(asked, EVERYTHING, cluster)
    mesh = resolve(asked, EVERYTHING, cluster.devices, sum(balance))
    plan = replace(Plan.contiguous(balance), mesh=mesh)
    after = plan_fits.check_plan(asked, plan, mesh, sum(balance), cluster)
    assert mesh.pipeline == len(balance), "is not cut down, so that the planner has no other number to name"
    return rows(deduplicate([*before, *after]))


@pytest.mark.parametrize(
    ("balance", "cluster", "changes", "right"),
    [
        ([9, 9, 9, 9, 5], Cluster(devices_per_node=4), {}, ["cluster.devices=5"]),
        ([9, 9, 9, 9, 5], Cluster(nodes=2, devices_per_node=2), {}, ["cluster.devices=3"]),
        ([9, 5], Cluster(), {}, ["planner.balance=[14]", "cluster.devices=2"]),
        ([9, 9, 5], Cluster(devices_per_node=4), {"mesh__data": 2}, ["cluster.devices=6"]),
    ],
)
def test_more_stated_stages_than_devices_are_reported_once(balance, cluster, changes, right):
    assert stated(balance, cluster, **changes) == [("planner.balance", balance, right)]


def test_no_more_gpus_are_recommended_than_this_machine_has(monkeypatch):
    monkeypatch.setattr(request.devices, "detect", lambda wanted: DetectedDevices("cuda", "a GPU", 1, 80))
    assert stated([9, 5], Cluster(), "auto")[0][2] == ["planner.balance=[14]"]
    described = {"cluster__name": "flat", "mode": "plan"}
    assert stated([9, 5], Cluster(), "auto", **described)[0][2] == ["planner.balance=[14]", "cluster.devices=2"]


def test_stated_stages_that_fit_are_no_problem():
    assert stated([9, 5], EIGHT) == []
    assert [(key, value) for key, value, _ in stated([9, 5], Cluster(), mesh__data=4)] == [("mesh.data", 4)]


def test_more_stated_stages_than_layers_are_left_to_the_planner():
    changes = {"planner": {"name": "given", "balance": [1] * 9}, "mesh__pipeline": 9}
    assert against(profile_of(), **changes) == []


def memory(peaks: list[int], plan: Plan, there: int = 100, reserve: int = 0) -> list[tuple[str, dict[str, float]]]:
    """The first words of the message, and the numbers."""
    cluster = Cluster(devices_per_node=8, device=Device(memory_bytes=there))
    found = plan_fits.check_memory(plan, peaks, cluster, MemoryModel(reserve_bytes=reserve))
    assert all((one.key, one.value) == ("cluster.memory_gb", None) for one in found)
    return [(problem.message.partition(" need")[0], problem.numbers) for problem in found]


def full(needed: int, available: int) -> dict[str, float]:
    return {"needed_bytes": needed, "available_bytes": available}


def test_a_stage_without_enough_memory():
    plan = Plan.contiguous((1, 1, 1), 4)
    found = memory([100 << 30, 22 << 30, 27 << 30], plan, 22 << 30)
    assert found == [("stages 0, 2", full(100 << 30, 22 << 30))]
    nearly = (22 << 30) + (30 << 20)
    assert memory([nearly, 0, 0], plan, 22 << 30) == [("stage 0", full(nearly, 22 << 30))]


def test_all_stages_that_do_not_fit_are_one_problem():
    plan = Plan.contiguous((1,) * 6, 4)
    assert memory([300, 200, 200, 200, 50, 200], plan) == [("stages 0 to 3, 5", full(300, 100))]


def test_what_is_kept_free_counts():
    plan = Plan.contiguous((1,))
    assert memory([100], plan) == []
    assert memory([100], plan, reserve=1) == [("stage 0", full(100, 99))]


def test_a_device_with_several_stages():
    plan = Plan(Mesh(pipeline=3), (Stage(0, 0, 0), Stage(1, 1, 1), Stage(2, 2, 0)))
    assert memory([200, 50], plan) == [("stages 0, 2 on one device", full(200, 100))]


def test_a_memory_is_shown_as_it_was_typed_and_else_not_at_all():
    problem, chosen = plan_fits.too_little_memory("is full"), config(cluster__memory_gb=0.15)
    assert rows(plan_fits.with_value([problem], chosen, [])) == [("cluster.memory_gb", None, [])]
    typed = plan_fits.with_value([problem], chosen, ["cluster.memory_gb=0.15"])
    assert rows(typed) == [("cluster.memory_gb", 0.15, [])]


def test_scaled_times_are_those_of_another_device():
    found = request.request(config(costs="scaled"), PIPELINE, EIGHT)
    assert rows(found) == [("costs", "scaled", ["costs=measured"])] and found[0].hint == "profile=FILE"
    assert request.request(config(costs="scaled", profile="p.json"), PIPELINE, EIGHT) == []
    assert request.request(config(costs="scaled", cluster__name="flat", mode="plan"), PIPELINE, EIGHT) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_gathered_in_another_format_need_one(dtype):
    key = "engine.mixed_precision"
    chosen = {"engine__mixed_precision": "policy", "precision__dtype": dtype}
    alone = [config(**chosen), config(**chosen, precision__autocast=dtype)]
    for one in alone:
        assert rows(request.request(one, PIPELINE, EIGHT)) == [(key, "policy", [f"{key}=autocast", "precision=mixed"])]
    assert request.request(config(**chosen, precision__autocast="float16"), PIPELINE, EIGHT) == []
    assert request.request(config(engine__mixed_precision="autocast"), PIPELINE, EIGHT) == []
    volta = config(**chosen, cluster__peak_tflops={"float32": 16, "bfloat16": None})
    assert rows(request.request(volta, PIPELINE, EIGHT)) == [(key, "policy", [f"{key}=autocast"])]


def test_a_profile_alone_is_asked_for_with_a_batch_that_divides():
    assert rows(request.profiling(config(batch__micro_batches=7))) == [
        ("batch.micro_batches", 7, ["batch.micro_batches=8", "batch.micro_batches=4"]),
    ]
    assert request.profiling(config(mode="profile", cluster__name="flat", precision__dtype="float16")) == []


def test_a_planner_that_loses_layers_or_devices_is_named():
    plan = Plan.contiguous([2, 2])
    assert plan_fits.check_plan(config(), plan, plan.mesh, 4, EIGHT) == []
    (lost,) = plan_fits.check_plan(config(), plan, plan.mesh, 5, EIGHT)
    assert (lost.key, lost.value) == ("planner", "balance") and "4 layers, the model has 5" in lost.message
    (other,) = plan_fits.check_plan(config(), plan, Mesh(pipeline=3), 4, EIGHT)
    assert "asked for Mesh(data=1, pipeline=3, tensor=1)" in other.message
    (beyond,) = plan_fits.check_plan(config(), plan, plan.mesh, 4, Cluster(devices_per_node=1))
    assert "on device 1, the last one is 0" in beyond.message
