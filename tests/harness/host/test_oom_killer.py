"""A SIGKILL is attributed to the kernel's OOM killer, or to another sender."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from harness.host import devices, oom_killer


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a kernel, of which none is there yet."""
    monkeypatch.setattr(oom_killer, "VMSTAT", tmp_path / "vmstat")
    monkeypatch.setattr(oom_killer, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(devices, "GROUPS", tmp_path)
    monkeypatch.setattr(devices, "OWN_GROUP", tmp_path / "cgroup")
    return tmp_path


def test_a_count_that_grew_is_the_kernel(machine: Path) -> None:
    (machine / "vmstat").write_text("pgfault 7\noom_kill 2\n")
    (machine / "meminfo").write_text("MemTotal:  2097152 kB\n")
    status, reason = oom_killer.explain_kill("rank 1", oom_killer.kill_count())
    assert status == "error" and "rank 1 was killed (signal 9), not by the kernel" in reason
    (machine / "vmstat").write_text("pgfault 9\noom_kill 3\n")
    status, reason = oom_killer.explain_kill("rank 1", 2)
    assert status == "oom" and "by the kernel's OOM killer (out of memory): the largest process held " in reason
    assert reason.endswith(" of 2.0 GiB")


def test_a_kill_at_a_limit_on_cpu_time_may_be_that(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel kills a process at its hard limit, and counts it nowhere."""
    (machine / "vmstat").write_text("oom_kill 2\n")
    assert oom_killer.explain_kill("rank 1", 2)[1].endswith("OOM killer: by hand, or by a program")
    monkeypatch.setattr(resource, "getrlimit", {resource.RLIMIT_CPU: (5, 5)}.__getitem__)
    status, reason = oom_killer.explain_kill("rank 1", 2)
    assert status == "error" and "by hand, by a program, or by the limit on CPU time, 5 s for each process" in reason


def test_a_control_groups_count_and_limit(machine: Path) -> None:
    (machine / "cgroup").write_text("0::/job\n")
    (machine / "job").mkdir()
    (machine / "job" / "memory.events").write_text("oom 1\noom_kill 1\n")
    (machine / "job" / "memory.max").write_text(f"{3 << 20}\n")
    assert oom_killer.kill_count() == 1 and oom_killer.limit_bytes() == 3 << 20
    assert oom_killer.explain_kill("rank 0", 0)[0] == "oom" and oom_killer.explain_kill("rank 0", 1)[0] == "error"


def test_a_limit_of_version_1_is_in_the_reason(machine: Path) -> None:
    (machine / "meminfo").write_text("MemTotal:  24641536 kB\n")
    (machine / "cgroup").write_text("9:memory:/docker/0123\n")
    (machine / "memory").mkdir()
    (machine / "memory" / "memory.limit_in_bytes").write_text(f"{700 << 20}\n")
    (machine / "memory" / "memory.oom_control").write_text("under_oom 0\noom_kill 1\n")
    assert oom_killer.kill_count() == 1 and oom_killer.limit_bytes() == 700 << 20
    status, reason = oom_killer.explain_kill("rank 0", 0)
    assert status == "oom" and reason.endswith(" of 700.0 MiB")


def test_where_the_kernel_does_not_say_it_was_most_likely_memory(machine: Path) -> None:
    assert oom_killer.kill_count() is None
    status, reason = oom_killer.explain_kill("rank 0", None)
    assert status == "oom" and "most likely by the kernel" in reason


def test_this_machine() -> None:
    limit = oom_killer.limit_bytes()
    assert limit and limit > 1 << 26
