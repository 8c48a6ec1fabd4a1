"""Whatever a user gives is done or refused: no traceback, no hang.

The cases are the same in every run; REGATTA_FUZZ_SEED chooses others.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import run
from analysis import dataframe, paper_cli, records, run_folders
from analysis.paper_pages import PAGES
from harness.cli import compose
from harness.config.registry import FURTHER, ROOT
from harness.core.record import EXIT_CODES, RunRecord
from harness.core.run_files import LOG, RECORD
from harness.launch import supervisor
from harness.launch.supervisor import Outcome
from tests.support import fuzz
from tests.tiers import examples

REFUSED_OR_DONE = (0, EXIT_CODES["infeasible"], EXIT_CODES["preempted"])


SEED = os.environ.get("REGATTA_FUZZ_SEED")
"""None: the cases follow from the source of each test."""


def cases(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    chosen = settings(
        max_examples=examples(count),
        deadline=None,
        derandomize=SEED is None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )
    return chosen if SEED is None else lambda test: chosen(seed(SEED)(test))


@pytest.fixture(scope="module", autouse=True)
def no_processes() -> Iterator[None]:
    """What would be measured by a worker ends the run, as a signal does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "supervise", lambda *_: Outcome("preempted", "no worker in this test"))
        patch.delenv(FURTHER, raising=False)
        yield


def done(folder: str, *arguments: str) -> None:
    """Run it, and assert that it ended in order: with a result or a refusal, in every record that it left."""
    try:
        code = run.main([*arguments, f"out={folder}/out"], {})
    except SystemExit as error:  # of argparse
        assert error.code == 2
        return
    finally:
        os.environ.pop(FURTHER, None)
    for path in Path(folder, "out").rglob(RECORD):
        log = path.with_name(LOG)
        why = log.read_text() if log.exists() else ""
        assert RunRecord.load(path).status in ("ok", "infeasible", "preempted"), why
    assert code in REFUSED_OR_DONE or "-m" in arguments


def write_profile(folder: str, content: Any) -> str:
    path = Path(folder, "profile.json")
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8", errors="replace")
    return f"profile={path}"


@functools.cache
def documents() -> dict[str, list[bytes]]:
    """Of some committed archives of each paper the first records."""
    names = [f"{paper}_*" for paper in PAGES]
    archives = sorted(path for name in names for path in (ROOT / "analysis/results/records").glob(f"{name}.jsonl.gz"))
    small = [path for path in archives if path.stat().st_size < 100_000]
    return {path.name: gzip.decompress(path.read_bytes()).splitlines()[:6] for path in small}


@pytest.mark.timeout(600)
@given(st.data(), st.sampled_from(["page", "frame", "titles"]))
@cases(40)
def test_records(data: st.DataObject, what: str) -> None:
    """Broken ones are skipped by name, whatever is broken, and the others are shown."""
    name = data.draw(st.sampled_from(sorted(documents())))
    content = [json.loads(line) for line in documents()[name]]
    broken = data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=3, unique=True))
    for number in broken:
        content[number] = data.draw(fuzz.mutated(content[number]))
    with TemporaryDirectory() as folder:
        for number, document in enumerate(content):
            path = Path(folder, str(number), RECORD)
            path.parent.mkdir()
            path.write_text(json.dumps(document), encoding="utf-8")
        loaded = records.load([folder])
        assert len(loaded.records) + len(loaded.skipped) >= len(content) - len(broken)
        assert {one.place for one in loaded.skipped} <= {str(Path(folder, str(number))) for number in broken}
        if what == "page":
            page = PAGES[name.partition("_")[0]]
            assert paper_cli.main(page, [folder, "--format", "html"]) in (0, 2)
        elif what == "frame":
            dataframe.runs(loaded.records), dataframe.devices(loaded.records)
        elif loaded.records:
            run_folders.titled(run_folders.load(Path(folder)))


@pytest.mark.usefixtures("computation")
@pytest.mark.timeout(600)
@given(st.integers(1, 5), fuzz.overrides())
@cases(40)
def test_overrides(layers: int, overrides: list[str]) -> None:
    with TemporaryDirectory() as folder:
        done(folder, *overrides, write_profile(folder, fuzz.profile(layers)))


@pytest.mark.usefixtures("computation")
@pytest.mark.timeout(600)
@given(st.data(), st.sampled_from(["cluster", "model", "precision", "engine", "planner", "data", "sweeps"]))
@cases(40)
def test_yaml_files(data: st.DataObject, group: str) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "conf", group, "z.yaml")
        path.parent.mkdir(parents=True)
        path.write_bytes(data.draw(fuzz.yaml_file(group)))
        compose._composed.cache_clear()  # it does not ask whether files have changed
        chosen = ["-m", "+sweeps=z"] if group == "sweeps" else [f"{group}=z"]
        stored = write_profile(folder, fuzz.profile(3))
        done(
            folder, "--config-dir", f"{folder}/conf", *chosen, stored, "mode=plan", "cluster.devices=2", "tracker=none"
        )


@pytest.mark.usefixtures("computation")
@pytest.mark.timeout(600)
@given(st.data(), st.sampled_from(fuzz.ENGINES), st.sampled_from(["plan", "simulate", "tune", "profile"]))
@cases(40)
def test_profiles(data: st.DataObject, engine: str, mode: str) -> None:
    with TemporaryDirectory() as folder:
        layers = data.draw(st.integers(1, 5))
        content = data.draw(st.one_of(fuzz.mutated(fuzz.profile(layers)), st.sampled_from(fuzz.NOT_DOCUMENTS)))
        done(
            folder, f"mode={mode}", f"engine={engine}", "cluster=p40x8", write_profile(folder, content), "tracker=none"
        )
