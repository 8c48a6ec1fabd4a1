"""The clusters of conf/cluster: each builds, each number has its source, and the papers' numbers are as published."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from harness.cli.compose import CONF, compose
from harness.config import cluster_config, registry
from harness.config.cluster_config import ClusterConfig
from harness.config.registry import ROOT
from harness.core.cluster import Device
from harness.core.model_profile import ModelProfile
from harness.planning import profiles
from harness.simulator import layer_times
from tests.harness.config.composed_cluster import composed, gb_s, refused

PRESETS = sorted(path.stem for path in (CONF / "cluster").glob("*.yaml") if path.stem != "local")


def test_the_described_clusters():
    gpus = ["dgx1_p100", "dgx1_v100", "dgx_a100_40", "dgx_a100_80", "dgx_h100"]
    papers = ["flat", "gcp_a100", "h200", "madpipe", "p40x8", "piz_daint", "summit"]
    assert gpus + papers == PRESETS


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


@pytest.mark.parametrize(
    ("name", "nodes", "devices", "memory_gb", "dtype", "tflops", "memory_gb_s", "intra", "node", "host"),
    [
        ("p40x8", 1, 8, 22 * 2**30 / 1e9, "float32", 11.76, 346, 15.75, 15.75, 15.75),
        ("summit", 8, 6, 16, "float16", 125, 900, 50, 12.5, 50),
        ("piz_daint", 64, 1, 16, "float32", 9.3, 732, 15.75, 10, 15.75),
        ("gcp_a100", 2, 16, 40, "bfloat16", 312, 1555, 300, 12.5, 31.5),
        ("h200", 1, 1, 139 * 2**30 / 1e9, "bfloat16", 989, 4800, 450, 450, 63),
        ("madpipe", 1, 8, 16, "float32", 7, 600, 12, 12, 12),
        ("dgx1_p100", 1, 8, 16280 * 2**20 / 1e9, "float32", 10.6, 732, 72, 50, 15.75),
        ("dgx1_v100", 1, 8, 16160 * 2**20 / 1e9, "float16", 125, 900, 120, 50, 15.75),
        ("dgx_a100_40", 1, 8, 40536 * 2**20 / 1e9, "bfloat16", 312, 1555, 240, 200, 31.5),
        ("dgx_a100_80", 1, 8, 80 * 2**30 / 1e9, "bfloat16", 312, 2039, 240, 200, 31.5),
        ("dgx_h100", 1, 8, 81559 * 2**20 / 1e9, "bfloat16", 989, 3350, 370.8, 400, 63),
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


@pytest.mark.parametrize("name", ["dgx_a100_40", "dgx_a100_80", "dgx_h100", "gcp_a100", "h200"])
def test_with_tf32_the_peak_of_float32_is_that_of_tf32(name):
    """Tensor cores multiply TF32 half as fast as bfloat16 (NVIDIA's data sheets)."""
    without, with_tf32 = (composed(f"cluster={name}", *more).device for more in ((), ("precision.tf32=true",)))
    assert with_tf32.peak_flops["float32"] == pytest.approx(with_tf32.peak_flops["bfloat16"] / 2, rel=0.01)
    assert without.peak_flops["float32"] < 70e12 and "tf32" not in without.peak_flops
    typed = composed(f"cluster={name}", "precision.tf32=true", "cluster.peak_tflops.float32=20")
    assert typed.device.peak_flops["float32"] == 20e12


@pytest.mark.parametrize(("name", "values"), [("dgx_a100_80", "nominal"), ("gcp_a100", "effective")])
def test_with_tf32_the_share_of_the_peak_is_that_of_tf32(name, values):
    without, with_tf32 = (
        composed(f"cluster={name}", f"cluster.values={values}", *more).device for more in ((), ("precision.tf32=true",))
    )
    v100 = composed("cluster=dgx1_v100").device
    assert without.efficiencies["float32"] == v100.efficiencies["float32"], "without tensor cores"
    assert with_tf32.efficiencies["float32"] == 0.513


@pytest.mark.parametrize("name", ["dgx_a100_40", "dgx_a100_80", "dgx_h100"])
def test_with_tf32_waves_are_those_of_tensor_cores(name):
    """Tiles of 256 x 128 elements on tensor cores, of 128 x 128 without."""
    without, with_tf32 = (composed(f"cluster={name}", *more).device for more in ((), ("precision.tf32=true",)))
    assert 2 * without.wave_of("float32") == without.wave_of("bfloat16") == with_tf32.wave_of("float32")
    typed = composed(f"cluster={name}", "precision.tf32=true", "cluster.float32_wave_elements=5").device
    assert typed.wave_of("float32") == 5


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "cluster").glob("*.yaml")))
def test_what_is_fitted_on_tensor_cores_is_not_taken_for_float32(name):
    """A device that is much faster in a format of two bytes has a share of float32, and one of tf32, next to those of
    classes of matmuls."""
    group = compose([f"cluster={name}"]).cluster
    peaks = group.peak_tflops
    if max(peaks.float16 or 0, peaks.bfloat16 or 0) <= 2.1 * (peaks.float32 or 1e9):
        return
    shares = ["float32_efficiency", *(["tf32_efficiency"] if peaks.tf32 else [])]
    for part in (group, group.effective):
        if part.matmul_efficiency is not None:
            assert None not in [part[share] for share in shares], f"{name} takes those of tensor cores"


@pytest.mark.parametrize(("name", "values"), [("dgx_a100_80", "nominal"), ("gcp_a100", "effective")])
def test_a_share_of_float32_that_was_typed_counts_with_tf32(name, values):
    typed = (f"cluster={name}", f"cluster.values={values}", "precision.tf32=true")
    assert composed(*typed, "cluster.float32_efficiency=0.9").device.efficiencies["float32"] == 0.9
    own = composed(*typed, "cluster.tf32_efficiency=0.4").device
    assert own.efficiencies["float32"] == 0.4


def test_a_cluster_without_a_peak_of_tf32_keeps_that_of_float32():
    """Cards before Ampere have none: they multiply float32 as it is."""
    for typed in ((), ("precision.tf32=true",)):
        assert composed("cluster=p40x8", *typed).device.peak_flops["float32"] == 11.76e12


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
