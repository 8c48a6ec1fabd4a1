"""Clusters from their keys: this machine, the described ones, effective values, and all that is wrong at once."""

import json
from pathlib import Path
from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from harness.cli.compose import CONF, compose
from harness.config import cluster_config, registry
from harness.config.cluster_config import ClusterConfig
from harness.config.registry import ROOT
from harness.core.cluster import Cluster, Device, Link
from harness.core.model_profile import ModelProfile
from harness.core.problem import CannotRun
from harness.host import devices
from harness.host.devices import DetectedDevices
from harness.host.machine import Machine
from harness.planning import profiles
from harness.simulate import layer_times
from tests.problems import Row, rows

PRESETS = sorted(path.stem for path in (CONF / "cluster").glob("*.yaml") if path.stem != "local")
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


def composed(*overrides: str) -> Cluster:
    """The cluster of a command line."""
    return cluster_config.build(ClusterConfig(**compose(overrides).cluster))


def refused(*overrides: str) -> list[str]:
    with pytest.raises(CannotRun) as caught:
        compose(overrides)
    return [problem.key for problem in caught.value.problems]


def gb_s(link: Link) -> float:
    return round(1e-9 / link.beta_s_per_byte, 3)


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
        )
    )  # fmt: skip
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
    assert keys(effective={"efficiency": share}) == ["cluster.effective.efficiency"]


def test_a_wave_has_elements():
    wrong = problems(name="f", devices=1, memory_gb=1, bandwidth_gb_s=1, wave_elements=0)
    assert wrong == [("cluster.wave_elements", 0, ["cluster.wave_elements=1"])]


def test_a_described_cluster_must_be_described():
    assert problems(name="mine") == [
        ("cluster.devices", None, ["cluster.devices=8"]),
        ("cluster.memory_gb", None, ["cluster.memory_gb=16"]),
        ("cluster.bandwidth_gb_s", None, ["cluster.bandwidth_gb_s=12"]),
    ]


SHARES = {"efficiency"}
"""Numbers that are never null."""
NUMBERS = st.one_of(st.none(), st.floats(), st.sampled_from([0.0, 1e-320, 1e-9, 1.0, 1e15, 1e308]))


@given(
    st.fixed_dictionaries(
        dict.fromkeys({"memory_gb", "memory_bandwidth_gb_s", "kernel_s", "cores", *cluster_config.EFFECTIVE_KEYS} -
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


# -- the files in conf/cluster -----------------------------------------------------------------------------------------


def test_the_described_clusters():
    assert PRESETS == ["flat", "gcp_a100", "h200", "madpipe", "p40x8", "piz_daint", "summit"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_described_cluster_builds_with_all_of_its_values(name):
    cluster = composed(f"cluster={name}")
    assert cluster.name == name
    if compose([f"cluster={name}"]).cluster.effective.bandwidth_gb_s:
        assert composed(f"cluster={name}", "cluster.values=effective") != cluster


@pytest.mark.parametrize("name", PRESETS)
def test_every_number_has_a_comment(name):
    """The line of each number, or the one below, says where it is from."""
    lines = (CONF / "cluster" / f"{name}.yaml").read_text().splitlines()
    for line in lines[lines.index("defaults: [_cluster, _self_]") :]:
        code, _, comment = line.partition("#")
        number = code.partition(":")[2].strip()
        if name != "flat" and number and number[0].isdigit():
            assert len(comment) > 5, line


NODES = {
    "p40x8": (1, 8),
    "summit": (8, 6),
    "piz_daint": (64, 1),
    "gcp_a100": (2, 16),
    "h200": (1, 1),
    "madpipe": (1, 8),
}


@pytest.mark.parametrize(
    ("name", "nodes", "devices", "memory_gb", "dtype", "tflops", "memory_gb_s", "intra", "node", "host"),
    [
        ("p40x8", 1, 8, 22 * 2**30 / 1e9, "float32", 11.76, 346, 15.75, 15.75, 15.75),
        ("summit", 8, 6, 16, "float16", 125, 900, 50, 12.5, 50),
        ("piz_daint", 64, 1, 16, "float32", 9.3, 732, 15.75, 10, 15.75),
        ("gcp_a100", 2, 16, 40, "bfloat16", 312, 1555, 300, 12.5, 31.5),
        ("h200", 1, 1, 139 * 2**30 / 1e9, "bfloat16", 989, 4800, 450, 450, 63),
        ("madpipe", 1, 8, 16, "float32", 7, 600, 12, 12, 12),
    ],
)
def test_the_papers_numbers(name, nodes, devices, memory_gb, dtype, tflops, memory_gb_s, intra, node, host):
    cluster = composed(f"cluster={name}")
    assert (cluster.nodes, cluster.devices_per_node) == (nodes, devices)
    assert cluster.device.memory_bytes / 1e9 == pytest.approx(memory_gb, abs=0.1)
    assert cluster.device.peak_flops.get(dtype) == (tflops and tflops * 1e12)
    assert cluster.device.memory_bandwidth == memory_gb_s * 1e9
    assert (gb_s(cluster.intra), gb_s(cluster.node_port), gb_s(cluster.host_link)) == (intra, node, host)
    assert cluster.intra.duplex == ("half" if name == "madpipe" else "full")


@pytest.mark.parametrize("name", ["resnet50", "resnet101", "inception_v3", "densenet121"])
def test_the_profiles_of_the_madpipe_figures_have_the_times_of_its_device(name):
    stored = ModelProfile.load(ROOT / "sweeps" / "profiles" / f"{name}_1000.json")
    device = composed("cluster=madpipe").device
    assert (device.name, stored.device.name) == ("madpipe", "madpipe")
    priced = layer_times.analytic(stored, device)
    for again, layer in zip(priced.layers, stored.layers, strict=True):
        times = layer.forward_s, layer.backward_s
        assert (again.forward_s, again.backward_s) == pytest.approx(times, rel=1e-12)


def test_layers_of_the_madpipe_cluster_are_counted_and_not_measured_here():
    config = compose(["mode=plan", "cluster=madpipe", "planner=madpipe"])
    assert profiles.origin(config, cluster_config.build(ClusterConfig(**config.cluster))) == "counted"


def test_summits_effective_port_gives_the_rings_of_figure_6():
    """Six rings share a port. 24 stages x 2 replicas: 0.62 s; 6 stages x 8 replicas: 4.32 s, a ratio of 7."""
    port = composed("cluster=summit", "cluster.values=effective").node_port
    gradients_bytes = 2 * 11.96e9

    def all_reduce_s(stages: int, replicas: int) -> float:
        sent = 2 * (replicas - 1) / replicas * gradients_bytes / stages
        return 6 * sent * port.beta_s_per_byte

    assert all_reduce_s(24, 2) == pytest.approx(0.62, rel=0.01)
    assert all_reduce_s(6, 8) == pytest.approx(4.32, rel=0.01)


def test_keys_of_a_preset_can_be_overridden_and_mistyped_ones_are_refused():
    changed = composed("cluster=p40x8", "cluster.peak_tflops.float32=20", "cluster.bandwidth_gb_s=10")
    assert (changed.device.peak_flops["float32"], gb_s(changed.intra)) == (20e12, 10)
    assert changed.device.peak_flops["float64"] == 0.367e12
    assert composed("cluster=flat", "cluster.peak_tflops={float32: 3}").device.peak_flops == {"float32": 3e12}
    for typed in ("cluster.peak_tflops.float23=20", "cluster.effective.bandwith_gb_s=1", "cluster.alpha=0"):
        assert refused("cluster=p40x8", typed) == [typed.partition("=")[0]]
    assert refused("cluster=p40x8", "cluster.peak_tflops={float23: 1}") == ["cluster.peak_tflops.float23"]
    assert refused("cluster=p40x8", "cluster.peak_tflops=20") == ["cluster.peak_tflops"]


def test_a_cluster_of_ones_own_is_the_few_lines_that_flat_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shown = (CONF / "cluster" / "flat.yaml").read_text().partition("\n#\n#   ")[2].partition("\ndefaults")[0]
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mine.yaml").write_text(
        "\n".join(line.removeprefix("#").removeprefix("   ") for line in f"#   {shown}".splitlines())
    )
    monkeypatch.setattr(registry, "ROOT", tmp_path)  # the root is on the search path, next to conf/
    assert OmegaConf.load(tmp_path / "cluster" / "mine.yaml").name == "mine"
    mine = composed("cluster=mine", "cluster.values=effective")
    assert (mine.name, mine.devices, gb_s(mine.intra)) == ("mine (effective)", 4, 12)
    assert mine.device == Device("mine", 24 * 10**9, {"float32": 35.6e12}, 936e9, 0.6, 1e-5)
