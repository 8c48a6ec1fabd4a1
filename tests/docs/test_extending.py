"""The examples of the pages docs/howto/add_*.md are complete: copied into the tree as they say, they train."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.single.engine import Config as SingleConfig
from engines.single.engine import build as build_single
from harness.config import registry
from harness.core.plan import Plan
from harness.core.record import RunRecord
from harness.core.run_files import METRICS, RECORD
from harness.interfaces import OptimizerSpec, Session, SessionSpec
from tests.docs import pages
from tests.engines import networks
from tests.support import fork_servers, known_machine

pytestmark = pytest.mark.usefixtures("commands")

PAGES = ("add_an_engine.md", "add_a_planner.md", "add_a_model.md")
PAGE = "\n".join((registry.ROOT / "docs/howto" / name).read_text() for name in PAGES)
FILES = pages.files(PAGE)
COMMANDS = [line for example in pages.examples(PAGE) for line in example.commands]
COMMON = (
    "precision=fp64",
    "tracker=none",
    "costs=analytic",
    "steps=3",
    "warmup=1",
    "batch.size=8",
    "batch.micro_batches=2",
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with the files of the page."""
    root = pages.copy_sources(tmp_path_factory.mktemp("extended"))
    pages.write(FILES, root)
    return root


@pytest.fixture(scope="module")
def environment(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """That of all commands, whose workers are forked from one server and know this machine."""
    known = known_machine.known(tmp_path_factory)
    with known, fork_servers.serving(tree, os.environ | {"PYTHONPATH": str(tree)}) as found:
        yield found


def command(*words: str) -> str:
    """The page's command with these overrides."""
    (found,) = [line for line in COMMANDS if set(words) < set(line.split())]
    return found


def train(tree: Path, environment: Mapping[str, str], line: str) -> tuple[RunRecord, list[float]]:
    """The record and the losses of a run that a command starts."""
    python, script, *overrides = shlex.split(line)
    assert (python, script) == ("python", "run.py")
    folder = tree / "runs" / re.sub(r"\W+", "_", " ".join(overrides))
    done = subprocess.run(
        [sys.executable, script, *overrides, *COMMON, f"out={folder}"],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [json.loads(line)["loss"] for line in (folder / METRICS).read_text().splitlines()]
    return RunRecord.load(folder / RECORD), losses


def test_a_check_refuses_what_the_page_says(tree: Path) -> None:
    (rule,) = (block for block in PAGE.split("```python\n") if "def check(config)" in block)
    config = tree / "models/tiny/config.py"
    config.write_text(f"{FILES['models/tiny/config.py']}\n\n{rule.partition('```')[0]}")
    words = [*shlex.split(command("engine=single", "model=tiny"))[1:], "model.width=2"]
    done = subprocess.run([sys.executable, *words], cwd=tree, capture_output=True, text=True, check=False)
    (printed,) = (block for block in PAGE.split("```text\n") if block.startswith("engine=single model=tiny"))
    assert (done.returncode, done.stderr.strip()) == (2, printed.partition("```")[0].strip())


@pytest.mark.parametrize(
    ("prefix", "most"), [("engines/simple_dp/", 50), ("planners/front_heavy.py", 30), ("models/tiny/", 30)]
)
def test_an_example_is_short(prefix: str, most: int) -> None:
    lines = [line for name, text in FILES.items() if name.startswith(prefix) for line in text.splitlines()]
    assert 10 < len(lines) <= most


def test_the_configuration_of_an_example_is_two_lines() -> None:
    configurations = [text for name, text in FILES.items() if name.endswith(".yaml")]
    assert [len(text.splitlines()) for text in configurations] == [2, 2, 2]
    for text in configurations:
        shown = text.splitlines()[0].partition(": python run.py ")[2]
        assert any(set(shown.split()) <= set(line.split()) for line in COMMANDS), f"no command has {shown}"


def test_the_engine_trains_like_single(tree: Path, environment: Mapping[str, str]) -> None:
    """Its replicas' gradients add up: losses of three steps are those of one device. It sends what is predicted."""
    shown = command("engine=simple_dp", "mesh.data=2")
    record, losses = train(tree, environment, shown)
    _, alone = train(
        tree, environment, shown.replace("engine=simple_dp", "engine=single").replace("mesh.data=2", "mesh.data=1")
    )
    assert len(losses) == 4
    assert losses == pytest.approx(alone, rel=1e-12)
    assert len(set(losses)) == 4, "it learns"
    assert record.metrics["bytes_sent"] == record.predicted["bytes_sent"]
    assert record.metrics["bytes_sent"]["all_reduce"] > 0
    assert min(record.metrics["utilization"]) > 0


def test_the_planner_plans_for_gpipe(tree: Path, environment: Mapping[str, str]) -> None:
    record, losses = train(tree, environment, command("planner=front_heavy"))
    assert record.plan is not None
    assert Plan.from_json(record.plan).balance == (4, 1)
    assert len(losses) == 4


def test_the_model_trains_on_one_device_and_in_a_pipeline(tree: Path, environment: Mapping[str, str]) -> None:
    _, alone = train(tree, environment, command("engine=single", "model=tiny"))
    _, losses = train(tree, environment, command("engine=gpipe", "model=tiny"))
    assert losses == pytest.approx(alone, rel=1e-12)
    assert len(set(losses)) == 4


def test_the_session_of_one_process_trains_like_single() -> None:
    (code,) = [block for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S) if "(LocalSession)" in block]
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    model, plan = networks.ALL["tokens"], Plan.contiguous([len(networks.ALL["tokens"].layers())], 3)
    spec = SessionSpec(("cpu",), OptimizerSpec("adam", lr=0.01), "float64", seed=7)

    def losses(session: Session) -> list[float]:
        torch.manual_seed(3)
        return [session.step(model.sample(8)).loss for _ in range(3)]

    with namespace["AccumulatingSession"](model, plan, spec) as session:
        found = losses(session)
    with build_single(SingleConfig()).session(model, plan, spec) as single:
        assert found == pytest.approx(losses(single), rel=1e-12)
