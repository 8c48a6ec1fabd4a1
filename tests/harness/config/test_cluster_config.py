"""Clusters from their keys: this machine, the described ones, effective values, and all that is wrong at once."""

import json
from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.config import cluster_config, cluster_parts
from harness.config.cluster_config import ClusterConfig
from harness.core.cluster import Cluster, Device, Link
from harness.core.problem import CannotRun
from harness.host import devices
from harness.host.devices import DetectedDevices
from harness.host.machine import Machine
from tests.harness.config.composed_cluster import composed, gb_s
from tests.problems import Row, rows

MEASURED = Machine(
    Device("a CPU", 1, {"float32": 9e10, "float64": 4e10}, 4e10, kernel_s=2e-6), Link(1e-5, 1 / 20e9), cores=1.84
)


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(devices, "detect", lambda wanted: DetectedDevices("cpu", "a CPU", 2, 10**9))


@pytest.fixture
def one_gpu(monkeypatch):
    cpu, gpu = DetectedDevices("cpu", "a CPU", 2, 10**9), DetectedDevices("cuda", "a GPU", 1, 80 * 10**9)
    monkeypatch.setattr(devices, "detect", lambda wanted: cpu if wanted == "cpu" else gpu)


def problems(**keys) -> list[Row]:
    with pytest.raises(CannotRun) as caught:
        cluster_config.build(ClusterConfig(**keys))
    return rows(caught.value.problems)


# -- a described cluster -----------------------------------------------------------------------------------------------


def test_a_described_cluster_in_the_users_units():
    flat = cluster_config.build(ClusterConfig("flat", devices=8, memory_gb=16, bandwidth_gb_s=12, alpha_s=1e-5))
    assert flat.devices == 8
    assert flat.device == Device("flat", 16 * 10**9)
    assert flat.link(0, 7).seconds(12 * 10**9) == pytest.approx(1 + 1e-5)


def test_several_nodes():
    two = cluster_config.build(ClusterConfig("flat", nodes=2, devices=4, memory_gb=1, bandwidth_gb_s=1))
    assert (two.devices, two.devices_per_node) == (8, 4)
    assert two.link(0, 3) == two.link(3, 4) == two.host_link


def test_a_device_with_peaks():
    device = cluster_config.build(
        ClusterConfig(
            "mine", devices=1, device="RTX 3090", memory_gb=24, bandwidth_gb_s=1, peak_tflops={"float32": 35.6},
            memory_bandwidth_gb_s=936, efficiency=0.7, kernel_s=1e-5, wave_elements=82 * 128 * 128,
        )
    ).device  # fmt: skip
    assert device == Device("RTX 3090", 24 * 10**9, {"float32": 35.6e12}, 936e9, 0.7, 1e-5, 82 * 128 * 128)


def test_links_of_three_kinds():
    cluster = cluster_config.build(
        ClusterConfig(
            "mine", nodes=2, devices=2, memory_gb=1, bandwidth_gb_s=50, alpha_s=1e-6, duplex="half",
            node_bandwidth_gb_s=10, node_alpha_s=5e-6, host_bandwidth_gb_s=25, blocking_messages=True, cores=3,
            node_alone_gb_s=12.5, task_s=1e-3,
        )
    )  # fmt: skip
    assert (cluster.alone_bandwidth, cluster.task_s) == (12.5e9, 1e-3)
    assert cluster.link(0, 1) == Link(1e-6, 1 / 50e9, "half")
    assert cluster.link(1, 2) == Link(5e-6, 1 / 10e9, "half")
    assert cluster.host_link == Link(1e-6, 1 / 25e9, "half")
    assert (cluster.blocking_messages, cluster.cores) == (True, 3)


# -- this machine ------------------------------------------------------------------------------------------------------


def test_local_cpu_devices_are_the_cores_and_share_the_memory(two_cores):
    local = cluster_config.build(ClusterConfig())
    assert (local.devices, local.device.name, local.device.memory_bytes) == (2, "a CPU", 5 * 10**8)
    assert local.link(0, 1).seconds(5 * 10**9) == pytest.approx(1)


def test_more_cpu_devices_than_cores_share_them_too(two_cores):
    local = cluster_config.build(ClusterConfig(devices=4))
    assert (local.devices, local.device.memory_bytes, local.cores) == (4, 25 * 10**7, 2)


def test_memory_and_bandwidth_of_local_devices_can_be_given(two_cores):
    local = cluster_config.build(ClusterConfig(memory_gb=0.5, bandwidth_gb_s=1))
    assert local.device.memory_bytes == 5 * 10**8
    assert local.link(0, 1).seconds(10**9) == pytest.approx(1)


def test_what_was_measured_here(two_cores):
    local = cluster_config.build(ClusterConfig(), MEASURED)
    assert local.device == Device("a CPU", 5 * 10**8, {"float32": 9e10, "float64": 4e10}, 4e10, 1.0, 2e-6)
    assert local.intra == local.node_port == local.host_link == Link(1e-5, 1 / 20e9)
    assert local.cores == 1.84


def test_what_is_given_counts_more_than_what_was_measured(two_cores):
    given = ClusterConfig(peak_tflops={"float32": 1}, memory_bandwidth_gb_s=2, kernel_s=0, bandwidth_gb_s=3, cores=0)
    local = cluster_config.build(given, MEASURED)
    assert local.device.peak_flops == {"float32": 1e12, "float64": 4e10}
    assert (local.device.memory_bandwidth, local.device.kernel_s, local.cores) == (2e9, 0, 0)
    assert local.intra == local.host_link == Link(1e-5, 1 / 3e9)


def test_a_gpu_has_its_own_way_to_the_host(one_gpu):
    machine = Machine(Device("a GPU", 1, {"float32": 1e13}, 1e12), Link(0, 1 / 100e9), Link(1e-5, 1 / 50e9))
    local = cluster_config.build(ClusterConfig(bandwidth_gb_s=200), machine)
    assert (gb_s(local.intra), gb_s(local.host_link), local.cores) == (200, 50, 0)


def test_each_gpu_has_all_of_its_memory(one_gpu):
    local = cluster_config.build(ClusterConfig())
    assert (local.devices, local.device.name, local.device.memory_bytes) == (1, "a GPU", 80 * 10**9)
    assert (gb_s(local.intra), local.cores) == (12, 0)


def test_more_gpus_than_there_are(one_gpu):
    assert problems(devices=4) == [("cluster.devices", 4, ["cluster.devices=1"])]


def test_cuda_without_a_gpu(monkeypatch):
    monkeypatch.setattr(devices, "detect", lambda wanted: DetectedDevices("cuda", "GPU", 0, 0))
    assert problems(device="cuda") == [("cluster.device", "cuda", ["cluster.device=cpu"])]


def test_this_machine_is_one_node_of_cpus_or_gpus(two_cores):
    assert problems(nodes=2) == [("cluster.nodes", 2, ["cluster.nodes=1"])]
    assert problems(device="tpu") == [("cluster.device", "tpu", ["cluster.device=cpu"])]


# -- what is wrong -----------------------------------------------------------------------------------------------------


def test_all_impossible_numbers_at_once():
    wrong = problems(
        name="flat", nodes=0, devices=-1, memory_gb=0, bandwidth_gb_s=float("nan"), alpha_s=-1, duplex="x",
        peak_tflops={"float32": 0, "float8": 1}, memory_bandwidth_gb_s=float("inf"), efficiency=1.5, kernel_s=-1e-6,
        node_bandwidth_gb_s=-2, host_alpha_s=float("inf"), cores=-1, effective={"bandwidth_gb_s": 0, "bandwith": 3},
        values="real",
    )  # fmt: skip
    assert wrong == [
        ("cluster.nodes", 0, ["cluster.nodes=1"]),
        ("cluster.devices", -1, ["cluster.devices=1"]),
        ("cluster.memory_gb", 0, ["cluster.memory_gb=16"]),
        ("cluster.memory_bandwidth_gb_s", float("inf"), ["cluster.memory_bandwidth_gb_s=12"]),
        ("cluster.kernel_s", -1e-06, ["cluster.kernel_s=0"]),
        ("cluster.bandwidth_gb_s", ANY, ["cluster.bandwidth_gb_s=12"]),
        ("cluster.alpha_s", -1, ["cluster.alpha_s=0"]),
        ("cluster.node_bandwidth_gb_s", -2, ["cluster.node_bandwidth_gb_s=12"]),
        ("cluster.host_alpha_s", float("inf"), ["cluster.host_alpha_s=0"]),
        ("cluster.cores", -1, ["cluster.cores=0"]),
        ("cluster.peak_tflops.float32", 0, ["cluster.peak_tflops.float32=12"]),
        ("cluster.effective.bandwidth_gb_s", 0, ["cluster.effective.bandwidth_gb_s=12"]),
        ("cluster.duplex", "x", ["cluster.duplex=full"]),
        ("cluster.values", "real", ["cluster.values=nominal"]),
        ("cluster.peak_tflops.float8", None, []),
        ("cluster.effective.bandwith", None, []),
        ("cluster.efficiency", 1.5, ["cluster.efficiency=1"]),
    ]


@pytest.mark.parametrize("share", [0, -0.5, 1.01, float("nan"), float("inf")])
def test_efficiency_is_a_share(share):
    def keys(**own) -> list[str]:
        return [key for key, _, _ in problems(name="f", devices=1, memory_gb=1, bandwidth_gb_s=1, **own)]

    assert keys(efficiency=share) == ["cluster.efficiency"]
    if share != 1.01:
        assert keys(convolution_efficiency=share) == ["cluster.convolution_efficiency"]
    assert keys(convolution_efficiency=2.26) == ["cluster.convolution_efficiency"]
    fast = ClusterConfig("f", devices=1, memory_gb=1, bandwidth_gb_s=1, convolution_efficiency=2.25)
    assert cluster_config.build(fast).device.efficiency_of("convolution") == 2.25
    assert keys(effective={"efficiency": share}) == ["cluster.effective.efficiency"]


@pytest.mark.parametrize("share", [-0.1, 1.01, float("nan"), float("inf")])
def test_overlap_is_a_share_that_may_be_none(share):
    def keys(**own) -> list[str]:
        return [key for key, _, _ in problems(name="f", devices=1, memory_gb=1, bandwidth_gb_s=1, **own)]

    assert keys(overlap=share) == ["cluster.overlap"]
    assert keys(effective={"overlap": share}) == ["cluster.effective.overlap"]
    described = ClusterConfig("f", devices=2, memory_gb=1, bandwidth_gb_s=1, overlap=0.0)
    assert cluster_config.build(described).overlap == 0


def test_slow_devices_are_among_those_of_the_cluster():
    described = {"name": "f", "devices": 2, "nodes": 2, "memory_gb": 1, "bandwidth_gb_s": 1}
    cluster = cluster_config.build(ClusterConfig(**described, slow_device=[3, 1, 3], slow_factor=2.0))
    assert cluster.slow == ((1, 2.0), (3, 2.0)) and Cluster.from_json(cluster.to_json()) == cluster
    assert problems(**described, slow_device=[0, 4]) == [("cluster.slow_device", [0, 4], ["cluster.slow_device=[3]"])]
    assert problems(**described, slow_device=[-1])[0][0] == "cluster.slow_device"
    for factor in (0.5, float("nan"), float("inf"), 1e9):
        assert problems(**described, slow_factor=factor) == [("cluster.slow_factor", ANY, ["cluster.slow_factor=1.5"])]


def test_a_wave_has_elements():
    for key in ("wave_elements", "float32_wave_elements"):
        wrong = problems(name="f", devices=1, memory_gb=1, bandwidth_gb_s=1, **{key: 0})
        assert wrong == [(f"cluster.{key}", 0, [f"cluster.{key}=1"])]


def test_a_described_cluster_must_be_described():
    assert problems(name="mine") == [
        ("cluster.devices", None, ["cluster.devices=8"]),
        ("cluster.memory_gb", None, ["cluster.memory_gb=16"]),
        ("cluster.bandwidth_gb_s", None, ["cluster.bandwidth_gb_s=12"]),
    ]


SHARES = {"efficiency", "overlap"}
"""Numbers that are never null."""
NUMBERS = st.one_of(st.none(), st.floats(), st.sampled_from([0.0, 1e-320, 1e-9, 1.0, 1e15, 1e308]))


@given(
    st.fixed_dictionaries(
        dict.fromkeys({"memory_gb", "memory_bandwidth_gb_s", "kernel_s", "cores", *cluster_parts.EFFECTIVE_KEYS} -
        SHARES,
                      NUMBERS)
    ),
    st.fixed_dictionaries({"float32": NUMBERS}),
    st.fixed_dictionaries(dict.fromkeys(("bandwidth_gb_s", "efficiency"), NUMBERS)),
    st.sampled_from(cluster_config.VALUES),
)  # fmt: skip
def test_any_numbers_make_a_cluster_or_problems(keys, peaks, effective, values):
    config = ClusterConfig("f", devices=2, peak_tflops=peaks, effective=effective, values=values, **keys)
    try:
        cluster = cluster_config.build(config)
    except CannotRun as error:
        assert all(problem.key.startswith("cluster.") for problem in error.problems)
    else:
        assert Cluster.from_json(json.loads(json.dumps(cluster.to_json(), allow_nan=False))) == cluster


# -- nominal and effective values --------------------------------------------------------------------------------------


def test_effective_values_take_the_place_of_nominal_ones_and_are_reported():
    nominal, effective = composed("cluster=p40x8"), composed("cluster=p40x8", "cluster.values=effective")
    assert (nominal.name, gb_s(nominal.intra)) == ("p40x8", 15.75)
    assert (effective.name, gb_s(effective.intra)) == ("p40x8 (effective)", 12)
    assert gb_s(effective.host_link) == 12  # as the links
    assert nominal.device == effective.device


@pytest.mark.parametrize("values", cluster_config.VALUES)
def test_a_number_that_is_typed_holds_for_both_values(values):
    typed = composed("cluster=p40x8", f"cluster.values={values}", "cluster.bandwidth_gb_s=10")
    assert gb_s(typed.intra) == 10


def test_an_effective_number_that_is_typed_holds_for_the_effective_values():
    typed = ("cluster=p40x8", "cluster.bandwidth_gb_s=10", "cluster.effective.bandwidth_gb_s=9")
    assert gb_s(composed(*typed).intra) == 10
    assert gb_s(composed(*typed, "cluster.values=effective").intra) == 9


def test_one_number_that_is_typed_leaves_the_other_effective_ones():
    typed = composed("cluster=summit", "cluster.values=effective", "cluster.host_bandwidth_gb_s=40")
    assert (gb_s(typed.host_link), gb_s(typed.node_port)) == (40, 9.69)


def test_efficiency_may_be_an_effective_value():
    nominal, effective = composed("cluster=summit"), composed("cluster=summit", "cluster.values=effective")
    assert nominal.device.efficiency == 1 > effective.device.efficiency
    typed = composed("cluster=summit", "cluster.values=effective", "cluster.efficiency=0.5")
    assert typed.device.efficiency == 0.5


def test_a_cluster_without_effective_values_has_none_to_take():
    described = {"devices": 1, "memory_gb": 1, "bandwidth_gb_s": 1}
    assert problems(name="f", values="effective", **described) == [
        ("cluster.values", "effective", ["cluster.values=nominal"])
    ]
    assert gb_s(composed("cluster=flat", "cluster.values=effective", "cluster.effective.bandwidth_gb_s=2").intra) == 2


@pytest.mark.parametrize(
    ("typed", "reported"),
    [
        (["bandwidth_gb_s=-3"], ["bandwidth_gb_s"]),
        (["bandwidth_gb_s=nan"], ["bandwidth_gb_s"]),
        (["effective.bandwidth_gb_s=-3"], ["effective.bandwidth_gb_s"]),
        (["bandwidth_gb_s=-3", "effective.bandwidth_gb_s=-4"],
         ["bandwidth_gb_s", "effective.bandwidth_gb_s"]),
    ],
)  # fmt: skip
def test_a_typed_number_that_no_link_can_have_is_reported_once(typed, reported):
    with pytest.raises(CannotRun) as caught:
        composed("cluster=p40x8", *(f"cluster.{override}" for override in typed))
    assert [problem.key for problem in caught.value.problems] == [f"cluster.{key}" for key in reported]
