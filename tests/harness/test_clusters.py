import pytest

from harness import clusters, devices
from harness.clusters import ClusterConfig
from harness.devices import Found
from harness.problem import CannotRun


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(devices, "detect", lambda wanted: Found("cpu", "a CPU", 2, 10**9))


@pytest.fixture
def one_gpu(monkeypatch):
    cpu, gpu = Found("cpu", "a CPU", 2, 10**9), Found("cuda", "a GPU", 1, 80 * 10**9)
    monkeypatch.setattr(devices, "detect", lambda wanted: cpu if wanted == "cpu" else gpu)


def problems(**keys) -> list[tuple[str, str]]:
    with pytest.raises(CannotRun) as caught:
        clusters.build(ClusterConfig(**keys))
    return [(problem.key, problem.mend) for problem in caught.value.problems]


def test_a_described_cluster_in_the_users_units():
    flat = clusters.build(ClusterConfig("flat", devices=8, memory_gb=16, bandwidth_gb_s=12, alpha_s=1e-5))
    assert flat.devices == 8
    assert flat.device.memory_bytes == 16 * 10**9
    assert flat.link(0, 7).seconds(12 * 10**9) == pytest.approx(1 + 1e-5)


def test_several_nodes():
    two = clusters.build(ClusterConfig("flat", nodes=2, devices=4, memory_gb=1, bandwidth_gb_s=1))
    assert (two.devices, two.devices_per_node) == (8, 4)


def test_local_cpu_devices_are_the_cores_and_share_the_memory(two_cores):
    local = clusters.build(ClusterConfig())
    assert (local.devices, local.device.name, local.device.memory_bytes) == (2, "a CPU", 5 * 10**8)
    assert local.link(0, 1).seconds(5 * 10**9) == pytest.approx(1)


def test_more_cpu_devices_than_cores_share_it_too(two_cores):
    local = clusters.build(ClusterConfig(devices=4))
    assert (local.devices, local.device.memory_bytes) == (4, 25 * 10**7)


def test_memory_and_bandwidth_of_local_devices_can_be_given(two_cores):
    local = clusters.build(ClusterConfig(memory_gb=0.5, bandwidth_gb_s=1))
    assert local.device.memory_bytes == 5 * 10**8
    assert local.link(0, 1).seconds(10**9) == pytest.approx(1)


def test_each_gpu_has_all_of_its_memory(one_gpu):
    local = clusters.build(ClusterConfig())
    assert (local.devices, local.device.name, local.device.memory_bytes) == (1, "a GPU", 80 * 10**9)


def test_more_gpus_than_there_are(one_gpu):
    assert problems(devices=4) == [("cluster.devices 4", "cluster.devices=1")]


def test_cuda_without_a_gpu(monkeypatch):
    monkeypatch.setattr(devices, "detect", lambda wanted: Found("cuda", "GPU", 0, 0))
    assert problems(device="cuda") == [("cluster.device cuda", "cluster.device=cpu")]


def test_this_machine_is_one_node(two_cores):
    assert problems(nodes=2) == [("cluster.nodes 2", "cluster.nodes=1")]


def test_all_impossible_numbers_at_once():
    wrong = problems(
        name="flat", nodes=0, devices=-1, device="tpu", memory_gb=0, bandwidth_gb_s=float("nan"), alpha_s=-1, duplex="x"
    )
    assert wrong == [
        ("cluster.nodes 0", "cluster.nodes=1"),
        ("cluster.devices -1", "cluster.devices=1"),
        ("cluster.memory_gb 0", "cluster.memory_gb=16"),
        ("cluster.bandwidth_gb_s nan", "cluster.bandwidth_gb_s=12"),
        ("cluster.alpha_s -1", "cluster.alpha_s=0"),
        ("cluster.device tpu", "cluster.device=auto"),
        ("cluster.duplex x", "cluster.duplex=full"),
    ]


def test_a_described_cluster_must_be_described():
    assert [key for key, _ in problems(name="mine")] == [
        "cluster.devices null", "cluster.memory_gb null", "cluster.bandwidth_gb_s null"
    ]  # fmt: skip
