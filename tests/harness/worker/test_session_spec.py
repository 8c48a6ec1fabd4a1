"""What a training process makes of the configuration for its session."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli.compose import compose
from harness.config import registry
from harness.core.cluster import Device, Link
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.problem import typed
from harness.host import devices, machine
from harness.host.devices import DetectedDevices
from harness.host.machine import Machine
from harness.worker import __main__ as worker

V100 = DetectedDevices("cuda", "a V100", 1, 16 * 10**9)
PEAKS = {"float32": 15e12, "float16": 112e12, "bfloat16": 2e12}


def instead(*overrides: str) -> list[str]:
    config = compose(["engine=single", *overrides])
    can = registry.build("engine", config.engine).capabilities
    return list(map(typed, worker._spec(config, ("cuda:0",), ModelProfile((LayerProfile("layer"),)), can).instead))


def test_formats_in_the_place_of_float16_are_those_of_the_measured_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGATTA_CACHE", str(tmp_path))
    monkeypatch.setattr(devices, "detect", lambda wanted="auto": V100)
    bfloat16, float32 = "precision.autocast=bfloat16", "precision.autocast=null"
    assert instead("precision.autocast=float16") == [bfloat16, float32], "nothing is known"
    machine.store(Machine(Device(V100.name, V100.memory_bytes, PEAKS, 9e11), Link(1e-5, 1e-9), None))
    assert instead("precision.autocast=float16") == [float32, bfloat16]
    assert instead("precision=mixed") == []
