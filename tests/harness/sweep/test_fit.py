"""mode=fit: its bytes are those of mode=simulate, and what it cannot say it names."""

from __future__ import annotations

import io
import os
import re
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.cli.compose import compose
from harness.config.overrides import quoted
from harness.core.problem import CannotRun
from harness.core.record import EXIT_CODES
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


def test_what_no_engine_trains_is_marked() -> None:
    cells = {("ddp", "never"): fit.Cell(1, 4, "1x8x1", simulated_only=False)}
    assert "†" not in "".join(drawn(cells))
    text = "".join(drawn(cells | {("deepspeed", "never"): fit.Cell(1, 4, "1x1x8", simulated_only=True)}))
    assert "1x1x8 †" in text and "† simulated only" in text


def drawn(cells: fit.Cells) -> list[str]:
    """The lines of a table of one precision."""
    console = Console(file=io.StringIO(), width=200, record=True)
    below = [*fit._drawn({"fp32": cells}, console)]
    return [console.export_text(), *below]


def test_a_precision_that_an_engine_does_not_take_is_named(typed: list[str]) -> None:
    code, text = printed(*typed, "engine=ddp,deepspeed", "precision=fp16")
    assert code == 0 and "not possible: ddp precision=fp16: precision fp16" in text


def test_a_signal_ends_it_with_what_is_known_and_leaves_nothing(
    typed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    of_engine, engines = fit._of_engine, []

    def interrupted(overrides: Sequence[str], *more: Any) -> Any:
        engines.append(overrides[-2])
        if len(engines) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return of_engine(overrides, *more)

    monkeypatch.setattr(fit, "_of_engine", interrupted)
    code, text = printed(*typed, "engine=ddp,fsdp,deepspeed", "precision=fp32")
    assert code == EXIT_CODES["preempted"] and engines == ["engine=ddp", "engine=fsdp"]
    assert "ended by SIGTERM" in text and re.search("^ddp ", text, re.MULTILINE) and "fsdp" not in text
    assert not [*(tmp_path / "temporary").iterdir()]


@pytest.mark.parametrize("engine", ["nonsense", "ddp,nonsense"])
def test_an_engine_that_is_none_is_refused(engine: str, typed: list[str]) -> None:
    with pytest.raises(CannotRun, match="nonsense"):
        printed(*typed, f"engine={engine}")


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        (["model=nosuch"], "model"),
        (["batch.sise=3"], "batch.sise"),
        (["cluster=nosuch"], "cluster"),
        (["precision=fp33"], "precision"),
        (["model=mlp", "batch.size=7", "mesh.data=2"], "batch.size"),
        (["engine=sbp", "model=gpt", "planner=megatron", "mesh.tensor=7", "cluster=flat"], "mesh.tensor"),
    ],
)
def test_what_no_engine_can_run_is_refused_once(wrong: list[str], key: str) -> None:
    with pytest.raises(CannotRun) as raised:
        printed("engine=ddp,fsdp", "cluster=dgx_a100_80", *wrong)
    said = [one.statement for one in raised.value.problems]
    assert {one.key for one in raised.value.problems} == {key} and len(said) == len(set(said))


def test_settings_that_are_to_be_compared_are_refused_in_words_of_its_own(typed: list[str]) -> None:
    """mode=tune is what it searches with, and no mode that was asked for."""
    with pytest.raises(CannotRun) as refused:
        printed(*typed, "engine=pipeline", "engine.schedule=all", "precision=fp32")
    (problem,) = refused.value.problems
    assert problem.key == "engine.schedule" and "tune" not in problem.message
