"""What is fitted to measured timings, and how it is reported: numbers, table, picture, cluster file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from harness.cli.compose import compose
from harness.config import cluster_config
from harness.config.cluster_config import ClusterConfig
from harness.core.cluster import Cluster, Device, Link
from harness.host.machine import Machine
from harness.measure import calibrated_cluster, calibration, calibration_plot
from harness.measure.alpha_beta_fit import Fit, Timing
from harness.measure.calibration_result import Calibration, Timings
from harness.simulator.routes import STEPS

ALPHA, BETA = 1e-4, 1e-9
SIZES = [4**exponent for exponent in range(6, 14)]
MACHINE = Machine(
    Device('CPU "8" @ 2.5GHz: 64-core', 8 * 10**9, {"float32": 1e12, "bfloat16": 2.5e12}, 3e10, kernel_s=2.5e-6),
    Link(5e-6, 1e-10),
    Link(7e-6, 2e-10),
    1.8,
)


def timings(slow: float = 1.0) -> tuple[Timing, ...]:
    """Exact ones, but that a reduce_scatter takes `slow` times as long."""
    found = []
    for name, steps in STEPS.items():
        for k in (2, 3):
            for size in SIZES:
                seconds = steps * ((k - 1) * ALPHA + (k - 1) / k * size * BETA)
                seconds *= slow if name == "reduce_scatter" else 1.0
                found.append(Timing(name, k, size, seconds, (0.9 * seconds, 1.2 * seconds)))
    return tuple(found)


def written(found: Calibration, *typed: str) -> tuple[str, Cluster, DictConfig]:
    """The cluster file, the cluster that was calibrated, and what the file's keys are."""
    config = compose(["mode=calibrate", "cluster.device=cpu", "cluster.devices=3", *typed])
    cluster = cluster_config.build(ClusterConfig(**config.cluster), MACHINE)
    named = replace(cluster.device, name=MACHINE.device.name)  # any machine's may be such a one
    cluster = replace(cluster, device=named)
    text = calibrated_cluster.text(found, cluster, config, Path("/runs/here"))
    keys = OmegaConf.create(text)
    assert isinstance(keys, DictConfig)
    return text, cluster, keys


def test_fits_are_stored_with_their_timings(tmp_path: Path) -> None:
    found = Calibration.of(Timings("gloo", 7, timings()))
    found.save(tmp_path / "calibration.json")
    assert Calibration.load(tmp_path / "calibration.json") == found
    assert (found.backend, found.rounds, found.groups, found.devices) == ("gloo", 7, [2, 3], ["cpu"] * 3)
    for fit in (*found.fits, *found.alone.values()):
        assert (fit.alpha_s, fit.beta_s_per_byte) == (pytest.approx(ALPHA), pytest.approx(BETA))


def test_metrics_are_those_of_the_chosen_fit_and_of_each_collective() -> None:
    found = Calibration.of(Timings("gloo", 7, timings(slow=3.0)))
    metrics = found.metrics()
    assert metrics["alpha_s"] == found.chosen.alpha_s and metrics["weights"] == found.chosen.weights
    assert metrics["bandwidth_gb_s"] == pytest.approx(1e-9 / found.chosen.beta_s_per_byte)
    assert metrics["r2"]["plain"] < 0.9, "one alpha and one beta for all do not fit a slow collective"
    assert metrics["r2_large"]["reduce_scatter"] == pytest.approx(1), "alone it does"
    assert metrics["r2_large"].keys() == {"plain", "relative", *STEPS}


def test_large_messages_are_those_of_a_megabyte_else_the_largest() -> None:
    found = Calibration.of(Timings("gloo", 1, timings()))
    assert {t.bytes for t in found.large} == {2**20, 2**22, 2**24, 2**26}
    small = tuple(t for t in timings() if t.bytes < 10**5)
    small = tuple(Timing(t.name, t.members, t.bytes - t.bytes % t.members, t.seconds) for t in small)
    assert {t.bytes for t in Calibration.of(Timings("gloo", 1, small)).large} == {2**16, 2**16 - 1}


def test_times_that_do_not_grow_show_no_bandwidth() -> None:
    same = tuple(Timing(t.name, t.members, t.bytes, 1.0 / t.bytes) for t in timings())
    with pytest.raises(
        ValueError, match=r"the timings show no bandwidth: .* 67108864 bytes, time does not grow .*steps=50"
    ):
        Calibration.of(Timings("gloo", 1, same))


def test_the_cluster_file_is_the_machine_with_fitted_links() -> None:
    _, cluster, keys = written(Calibration.of(Timings("gloo", 7, timings())))
    del keys["defaults"]
    config = OmegaConf.merge(OmegaConf.structured(ClusterConfig), keys)
    found = cluster_config.build(ClusterConfig(**config))  # type: ignore[arg-type]
    assert found.intra.alpha_s == pytest.approx(ALPHA, rel=1e-3)
    assert found.intra.beta_s_per_byte == pytest.approx(BETA, rel=1e-3)
    assert (found.name, found.devices, found.device.name) == ("calibrated", 3, MACHINE.device.name)
    assert found.device.peak_flops == pytest.approx(MACHINE.device.peak_flops)
    assert found.device.memory_bytes == pytest.approx(cluster.device.memory_bytes, rel=1e-3)
    assert (found.device.kernel_s, found.device.memory_bandwidth) == (2.5e-6, 3e10)
    assert found.host_link == Link(7e-6, 2e-10)
    assert found.cores == 1.8


def test_the_cluster_file_says_where_each_number_is_from() -> None:
    found = Calibration.of(Timings("gloo", 7, timings(slow=3.0)))
    text, _, _ = written(found, "cluster.memory_gb=2", "cluster.peak_tflops.float32=3")
    head, _, body = text.partition("defaults: [_cluster, _self_]\n\n")
    lines = {line.split(":")[0].strip(): line for line in body.splitlines()}
    assert all("#" in line for key, line in lines.items() if key not in ("name", "peak_tflops"))
    assert lines["memory_gb"].split() == ["memory_gb:", "2", "#", "as", "typed:", "cluster.memory_gb"]
    assert "3 " in lines["float32"] and lines["float32"].endswith("# as typed: cluster.peak_tflops.float32")
    assert "2.5 " in lines["bfloat16"] and lines["bfloat16"].endswith(
        "# measured here, by harness/measure/benchmark_machine.py"
    )
    assert f"# Below stands the {found.chosen.weights} fit" in head and "medians of 7 rounds" in head
    assert "--config-dir /runs/here " in head.splitlines()[1] and "(gloo, 2 and 3 ranks, 4.0 KiB to 64.0 MiB)" in head
    assert all(line.startswith("#") and len(line) <= 120 for line in head.splitlines())


def test_the_table_has_both_fits_next_to_what_was_measured() -> None:
    found = Calibration.of(Timings("gloo", 7, timings(slow=3.0)))
    console = Console(width=160, record=True)
    console.print(calibration.timed(found), calibration.fitted(found))
    lines = [line.split("  ") for line in console.export_text().splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    timed = [row for row in cells if row and row[0] in STEPS]
    assert [(row[0], row[1], row[2]) for row in timed] == [
        (name, k, size) for name in STEPS for k in ("2", "3") for size in ("4.0 KiB", "1.0 MiB", "64.0 MiB")
    ]
    largest = next(t for t in found.timings if (t.name, t.members, t.bytes) == ("reduce_scatter", 3, 2**26))
    off = found.plain.seconds(largest) / largest.seconds - 1
    assert timed[11][3:5] == ["134.8 ms", "121.3 ms to 161.8 ms"] and timed[11][6] == f"{off:+.0%}"
    alone = next(row for row in cells if row and row[0] == "plain, reduce_scatter alone")
    assert alone[1:] == ["300.0 us", "0.3333 GB/s", "1.000", "1.000", "1.00 times"]


def test_a_picture(tmp_path: Path) -> None:
    found = Calibration.of(Timings("gloo", 7, timings(slow=3.0)))
    calibration_plot.draw(found, tmp_path / "calibration.png", "here")
    assert (tmp_path / "calibration.png").read_bytes().startswith(b"\x89PNG")


def test_a_fit_without_bandwidth_is_shown_as_such() -> None:
    assert calibrated_cluster.speed(Fit("plain", 1.0, 0.0, 1.0)) == "unlimited"
