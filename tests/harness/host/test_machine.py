"""What is measured of this machine, and what is kept of it."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness.config import cluster_config
from harness.core.cluster import Device, Link
from harness.core.problem import CannotRun
from harness.host import devices, machine
from harness.host.devices import DetectedDevices
from harness.host.machine import Machine
from harness.measure import benchmark_machine
from tests.problems import refused, row

ROOT = Path(__file__).parents[3]
HERE = Machine(Device("a CPU", 10**9, {"float32": 9e10}, 4e10, kernel_s=2e-6), Link(1e-5, 5e-11), cores=1.84)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REGATTA_CACHE", str(tmp_path))
    monkeypatch.setattr(devices, "detect", lambda wanted="auto": DetectedDevices("cpu", "a CPU", 2, 10**9))
    return tmp_path


@pytest.fixture(scope="module")
def measured() -> tuple[Machine, list[float]]:
    """With the moments in seconds at which it said what it does, and of its end."""
    before, start = torch.get_num_threads(), time.perf_counter()
    moments: list[float] = []
    found = benchmark_machine.measure("cpu", lambda text: moments.append(time.perf_counter() - start))
    assert torch.get_num_threads() == before
    return found, [*moments, time.perf_counter() - start]


# -- measuring ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("computation")
def test_a_cpu_has_plausible_figures(measured):
    """Wide enough for any machine, and for one that others use: a wrong unit is a factor of 1000."""
    found, moments = measured
    assert found.device.name == devices.cpu_model()
    double, single = (found.device.peak_flops[name] for name in ("float64", "float32"))
    assert 1e9 < double < 1.5 * single < 1.5e12  # float32 is twice as fast, on a machine that nobody else uses
    assert 1e9 < found.device.memory_bandwidth < 1e12
    assert 1e-7 < found.device.kernel_s < 1e-4 < found.reference_s < 1.0
    assert found.device.efficiency == 1
    assert found.link.alpha_s < 0.01 and 1e8 < 1 / found.link.beta_s_per_byte < 1e12
    assert found.host_link is None
    assert 1 <= found.cores <= devices.cores() and 1 <= found.process_cores <= devices.cores()
    assert moments[-1] < 16  # 7 where nobody else computes


@pytest.mark.full
@pytest.mark.usefixtures("computation")
def test_what_processes_do_is_measured_next_to_what_is_known():
    """Only engines of several processes need it."""
    without = benchmark_machine.measure("cpu", processes=False)
    assert not without.calls and not without.process_cores and not without.knows_processes
    both = benchmark_machine.measure("cpu", known=without)
    assert both.calls and both.knows_processes
    assert replace(both, calls=(), process_cores=0.0) == without


def test_gpus_share_no_cores():
    assert Machine(Device("a GPU"), Link()).knows_processes


@pytest.mark.usefixtures("computation")
def test_it_makes_progress_all_the_time(measured):
    """A run with a short `launch.timeout_s` is not ended on a machine that is measured first; 3 s are seen on a busy
    one."""
    _, moments = measured
    assert max(after - before for before, after in pairwise(moments)) < 10
    assert len(moments) >= 6


@pytest.mark.usefixtures("computation")
def test_a_matmul_runs_on_one_thread(measured):
    """Two threads would show in the time that this process runs."""
    with benchmark_machine.intra_op_threads(1):
        start, running = time.perf_counter(), time.process_time()
        matmul, _ = benchmark_machine._matmul("cpu", torch.float32, 1024, benchmark_machine._wall)
        benchmark_machine._best(benchmark_machine._wall, matmul)
    assert time.process_time() - running < 1.2 * (time.perf_counter() - start)


def test_a_slow_moment_of_the_machine_does_not_fall_on_one_dtype_alone(monkeypatch):
    """All that is measured in its first 0.45 s, more than the budget of one figure, takes ten times as long."""
    now = 0.0

    def timer(work, calls: int) -> float:
        nonlocal now
        seconds = work() * (10 if now < 0.45 else 1)
        now += seconds * calls
        return seconds

    monkeypatch.setattr(benchmark_machine, "time", SimpleNamespace(perf_counter=lambda: now))
    assert benchmark_machine._best_of_each(timer, [lambda: 0.002, lambda: 0.004]) == [0.002, 0.004]


def test_two_messages_make_a_link():
    small, large = benchmark_machine.MESSAGES_BYTES
    link = Link(2e-5, 1 / 12e9)
    fitted = benchmark_machine._fitted([link.seconds(small), link.seconds(large)])
    assert (fitted.alpha_s, fitted.beta_s_per_byte) == pytest.approx((2e-5, 1 / 12e9))
    assert benchmark_machine._fitted([2e-5, 1e-5]) == Link(2e-5, 0)  # noise: the large one was faster


def test_no_gpu_is_reported(monkeypatch):
    monkeypatch.setattr(devices, "detect", lambda wanted: DetectedDevices("cuda", "GPU", 0, 0))
    with pytest.raises(ValueError, match=r"no GPU .* cluster\.device=cpu"):
        benchmark_machine.measure("cuda")


BUILT = ["sm_75", "sm_80", "sm_90a", "compute_90"]


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (12, 0)])
def test_a_gpu_that_torch_has_kernels_for(capability):
    """Those of its generation, or what the driver compiles for later ones."""
    benchmark_machine.refuse_without_kernels("a GPU", capability, BUILT)


@pytest.mark.parametrize(("capability", "built"), [((6, 1), BUILT), ((7, 0), BUILT), ((9, 0), BUILT[:2])])
def test_a_gpu_that_torch_has_no_kernels_for_is_refused(capability, built):
    """The first kernel would fail, with a message of CUDA."""
    with pytest.raises(CannotRun) as caught:
        benchmark_machine.refuse_without_kernels("Tesla P40", capability, built)
    (problem,) = refused(caught)
    assert row(problem) == ("cluster.device", "cuda", ["cluster.device=cpu"])


@pytest.mark.gpu
def test_a_gpu_has_plausible_figures():
    found = benchmark_machine.measure("cuda")
    assert 1e12 < found.device.peak_flops["float32"] < found.device.peak_flops["float16"] < 1e16
    assert 1e11 < found.device.memory_bandwidth < 1e14
    assert 1e-7 < found.device.kernel_s < 1e-4 < found.reference_s < 1.0
    assert found.host_link and 1e9 < 1 / found.host_link.beta_s_per_byte < 2e11
    assert found.cores == 0


# -- keeping -----------------------------------------------------------------------------------------------------------


def test_what_is_stored_is_found_again(cache):
    assert machine.stored() is None
    machine.store(HERE)
    assert machine.stored() == HERE
    (file,) = cache.rglob("*.json")
    assert file.parent.name == "machines" and machine.stored(remeasure=True) == HERE
    os.utime(file, times=(0, 0))
    assert machine.stored() == HERE and machine.stored(remeasure=True) is None


def test_another_device_torch_or_count_of_cores_is_another_machine(cache, monkeypatch):
    here = devices.detect("cpu")
    paths = [machine.path(here), machine.path(replace(here, name="another CPU"))]
    with monkeypatch.context() as other:
        other.setattr(devices, "cores", lambda: 64)
        paths.append(machine.path(here))
    with monkeypatch.context() as other:
        other.setattr(machine.importlib.metadata, "version", lambda package: "1.0")
        paths.append(machine.path(here))
    assert len(set(paths)) == 4
    assert machine.path(replace(here, memory_bytes=5)) == paths[0], "what is free changes all the time"


def test_a_gpu_alone_is_another_machine_than_one_of_eight(cache):
    """It has no link but to the host. A slice of a card has its name, and less memory."""
    gpu = DetectedDevices("cuda", "NVIDIA H100", 8, 80 << 30, "570.1")
    others = [replace(gpu, count=1), replace(gpu, memory_bytes=10 << 30), replace(gpu, driver="580.2")]
    assert len({machine.path(one) for one in (gpu, *others)}) == 4


def test_the_peak_of_float32_is_that_of_the_run(cache):
    """On GPUs: with TF32 it is several times as high."""
    gpu, cpu = DetectedDevices("cuda", "NVIDIA H100", 8, 80 << 30, "570.1"), devices.detect()
    assert machine.path(gpu, tf32=True) != machine.path(gpu)
    assert machine.path(cpu, tf32=True) == machine.path(cpu)


def test_the_memory_of_a_gpu_is_what_a_process_has_left_for_tensors(monkeypatch):
    """Context, driver and libraries take their part; what others use at the moment does not count."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70, 80))
    assert benchmark_machine._left_for_tensors(others_bytes=7) == 77
    found = DetectedDevices("cuda", "a GPU", 2, 80)
    measured = Machine(Device("a GPU", 77, {"float32": 1e12}), Link())
    monkeypatch.setattr(devices, "detect", lambda wanted: found)
    of = cluster_config.ClusterConfig()
    assert cluster_config.build(of, measured).device.memory_bytes == 77
    assert cluster_config.build(of).device.memory_bytes == 80


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "{}", "\x00\xff", json.dumps(HERE.to_json())[:-20], json.dumps({**HERE.to_json(), "schema": 99}),
        json.dumps({**HERE.to_json(), "cores": -1}), json.dumps(HERE.to_json()).replace("1.84", "NaN"),
        json.dumps(replace(HERE, device=Device("a CPU")).to_json()),
        json.dumps(replace(HERE, device=replace(HERE.device, name="another CPU")).to_json()),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:the cache is damaged")
def test_a_damaged_file_is_none(cache, text):
    place = machine.path(devices.detect("cpu"))
    place.parent.mkdir()
    place.write_text(text, encoding="latin-1")
    assert machine.stored() is None


def test_a_huge_file_is_named_and_not_read(cache):
    place = machine.path(devices.detect("cpu"))
    place.parent.mkdir()
    with place.open("w") as file:
        file.truncate(3 << 30)
    with pytest.warns(UserWarning, match=f"the cache is damaged, this is measured again: {place} has 3.0 GiB"):
        assert machine.stored() is None


def test_a_folder_that_cannot_be_written_is_a_warning(cache):
    (cache / "machines").write_text("a file")
    with pytest.warns(UserWarning, match="the next run measures again: .* -> set REGATTA_CACHE"):
        machine.store(HERE)
    assert machine.stored() is None


def test_reading_it_needs_no_torch():
    code = "import sys; from harness.host import machine; machine.stored(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
