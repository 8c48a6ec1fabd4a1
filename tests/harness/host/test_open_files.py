"""A limit of open files that is too small for the processes of a run."""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest

from harness.checks import configuration
from harness.cli.compose import compose
from harness.host import open_files


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def set_to(number: int) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda which: (number, number))

    return set_to


@pytest.mark.parametrize(
    ("number", "ranks", "hints"),
    [
        (47, 2, ["ulimit -n 1024"]),
        (48, 2, []),
        (1024, 124, []),
        (1024, 125, ["ulimit -n 1032"]),
        (resource.RLIM_INFINITY, 1000, []),
    ],
)
def test_how_many_files_the_ranks_need(limit: Callable[[int], None], number: int, ranks: int, hints: list[str]) -> None:
    limit(number)
    assert [problem.hint for problem in open_files.problems(ranks)] == hints


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("engine=myelin mesh.pipeline=2", ["ulimit -n"]),
        ("engine=gpipe mesh.pipeline=2", []),
        ("engine=myelin mesh.pipeline=2 mode=plan", []),
        ("engine=myelin mesh.pipeline=2 cluster=h200 cluster.devices=2 mode=simulate", []),
    ],
)
def test_only_ranks_that_train_here_need_files(limit: Callable[[int], None], typed: str, found: list[str]) -> None:
    limit(open_files.FOR_A_PROCESS + open_files.FOR_A_RANK)
    here = ["cluster.devices=2", "cluster.device=cpu"] if "cluster=" not in typed else []
    texts = [*typed.split(), *here]
    assert [problem.key for problem in configuration.request_problems(compose(texts), texts)] == found
