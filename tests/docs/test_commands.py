"""Commands and scripts of README, tutorials and pages of docs/howto run, and print what these show but for numbers."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from harness.config import registry
from harness.host.devices import cpu_model
from tests import tiers
from tests.docs import pages
from tests.support import fork_servers

DOCS = registry.ROOT / "docs"
TUTORIALS = (registry.ROOT / "README.md", *sorted((DOCS / "tutorials").glob("*.md")))
PAGES = (*TUTORIALS, DOCS / "howto/python.md", DOCS / "howto/export.md", DOCS / "howto/own_schedule.md")
EXCEPTED = {
    "make run": "sets up an environment, from a network",
    "make test": "runs this test",
    "source .venv/bin/activate": "the test runs in the environment already",
    "python -m slurm.submit engine=ddp,fsdp batch.micro_batches=2,4 ... tracker=wandb out=runs/wb": "is abridged",
    "python run.py -m +sweeps=torchgpipe_table4 scale=local": "takes minutes; its tests are in tests/analysis",
}
SHORT = {"steps": "1", "warmup": "2", "tracker": "none"}
SMALL = {"model=unet": {"model.size": "64", "model.channels": "4"}}
"""Further overrides of what trains a model."""
SEARCHED = {"model=gpt_12b": {"batch.size": "1024", "mesh.pipeline": "24"}}
"""Overrides of what searches for a plan of a model."""
INFEASIBLE = 2
NUMBER = re.compile(
    r"[~<]?-?\b\d[\d.,]*(?:e[-+]?\d+)?(?: (?:[num]?s|B|[KMG]iB|%|[kMGTP]?FLOP/s|samples/s)(?![\w/]))?(?: \*)?"
)

PART = re.compile(r"^((?:computing|communication|waiting|host) # #) #$")
"""A part of a step, masked, and its ratio: there is none where the part is so small that it is noise."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, where runs leave their folders."""
    return pages.copy_sources(tmp_path_factory.mktemp("documented"))


@pytest.fixture(scope="module")
def environment(tree: Path) -> Iterator[dict[str, str]]:
    """That of all commands: a cache of their own, and a fork server for their workers."""
    own = {"REGATTA_CACHE": str(tree / ".cache"), "PYTHONPATH": str(tree), "COLUMNS": "150"}
    with fork_servers.serving(tree, os.environ | own) as found:
        yield found


@pytest.fixture(scope="module")
def done() -> dict[str, str]:
    """What each command printed, for pages that have the same one."""
    return {}


def shortened(command: str) -> list[str]:
    """The words of a command, with few steps of a small model where it trains, and one depth where it searches long."""
    python, *words = shlex.split(command)
    assert python == "python", command
    if "mode=tune" in words:
        added = next((keys for word, keys in SEARCHED.items() if word in words), {})
    elif words[0] != "run.py" or any(word.startswith(("mode=", "--")) or word == "scale=paper" for word in words):
        return [sys.executable, *words]
    else:
        added = SHORT | next((keys for word, keys in SMALL.items() if word in words), {})
    kept = [word for word in words if word.partition("=")[0] not in added]
    return [sys.executable, *kept, *(f"{key}={value}" for key, value in added.items())]


def output(command: str, tree: Path, environment: Mapping[str, str]) -> str:
    words = shortened(command)
    run = subprocess.run(words, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode in (0, INFEASIBLE), f"{command}\n{run.stdout}{run.stderr}"
    assert (run.returncode == INFEASIBLE) == (" cannot run:" in run.stderr), f"{command}\n{run.stdout}{run.stderr}"
    return run.stdout + run.stderr


def masked(line: str) -> str:
    """A line without what differs from run to run, and from machine to machine."""
    line = line.replace("AMD EPYC", "CPU").replace(cpu_model(), "CPU").replace(", but on a busy machine", "")
    line = re.sub(r"torch [\d.]+(?:\+\w+)?", "torch", re.sub(r"\b[0-9a-f]{10}\b", "ID", line))
    line = re.sub(r"\(?\S*runs/\S*", "PATH", line)
    line = PART.sub(r"\1", " ".join(NUMBER.sub("#", line).split()))
    return line.replace("# at step #", "none")  # losses apart by rounding: on some machines by nothing


@pytest.mark.parametrize("page", tiers.split(PAGES, TUTORIALS), ids=lambda page: page.stem)
@pytest.mark.full
@pytest.mark.timeout(600)
def test_what_it_shows_happens(
    page: Path, tree: Path, environment: Mapping[str, str], done: dict[str, str], commands: None
) -> None:
    text = page.read_text(encoding="utf-8")
    pages.write(pages.files(text), tree)
    for example in pages.examples(text):
        for command in [command for command in example.commands if command not in EXCEPTED]:
            if command not in done:
                done[command] = output(command, tree, environment)
        printed = [masked(line) for one in example.commands for line in done.get(one, "").splitlines()]
        for line in example.promised:
            whole, dots, _ = masked(line).partition("...")
            found = any(one.startswith(whole) if dots else one == whole for one in printed)
            assert found, f"{example.commands} print no line {whole!r}:\n" + "\n".join(printed)
    for script in pages.scripts(text):
        output(shlex.join(["python", "-c", script]), tree, environment)


def test_what_is_excepted_is_shown() -> None:
    texts = [page.read_text() for page in PAGES]
    examples = [example for text in texts for example in (*pages.examples(text), *pages.transcripts(text))]
    shown = {one for example in examples for one in example.commands}
    assert set(EXCEPTED) <= shown
    assert len(EXCEPTED) <= 5
