"""mode=fit: its bytes are those of mode=simulate, and what it cannot say it names."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from harness.cli.compose import compose
from harness.config.overrides import quoted
from harness.core.problem import CannotRun
from harness.core.units import size
from harness.run import runner
from harness.sweep import fit
from tests.harness.planning.tune.nets import FLAT, LAYERS, net


@pytest.fixture
def typed(tmp_path: Path) -> list[str]:
    net(LAYERS, 2, 10**7).save(tmp_path / "p.json")
    return [*FLAT, quoted("profile", str(tmp_path / "p.json")), "cluster.nodes=1", "batch.size=16", "costs=measured"]


def printed(*overrides: str) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=200, record=True)
    code = fit.main(["mode=fit", *overrides], console)
    return code, console.export_text()


def test_bytes_are_those_of_a_simulation(typed: list[str], tmp_path: Path) -> None:
    code, text = printed(*typed, "engine=ddp,deepspeed", "precision=fp32")
    assert code == 0
    kinds = {line.split("  ")[0]: line for line in text.splitlines() if line.startswith(("ddp ", "deepspeed zero=3"))}
    assert [*kinds] == ["ddp", "deepspeed zero=3"]
    own = [*typed, "mode=simulate", "engine=ddp", "batch.micro_batches=2", "mesh.data=4", "tracker=none"]
    own.append(quoted("out", str(tmp_path / "run")))
    record = runner.run(compose(own), own)
    peak = max(record.metrics["peak_memory_bytes"])
    assert size(peak) in kinds["ddp"] and f"{100 * (1 - peak / 1e9):.0f} %" in kinds["ddp"]
    assert "1x4x1" in kinds["ddp"]


def test_what_does_not_fit_has_no_headroom_and_the_exit_code_says_so(typed: list[str]) -> None:
    code, text = printed(*typed, "engine=ddp", "precision=fp32", "cluster.memory_gb=0.05")
    assert code == 2 and re.search(r"ddp .*MiB\s+-\d+ %", text)


def test_a_precision_that_an_engine_does_not_take_is_named(typed: list[str]) -> None:
    code, text = printed(*typed, "engine=ddp,deepspeed", "precision=fp16")
    assert code == 0 and "not possible: ddp precision=fp16: precision fp16" in text


@pytest.mark.parametrize("engine", ["nonsense", "ddp,nonsense"])
def test_an_engine_that_is_none_is_refused(engine: str, typed: list[str]) -> None:
    with pytest.raises(CannotRun, match="nonsense"):
        printed(*typed, f"engine={engine}")
