"""One emulated Slurm for all tests here; without its programs they are skipped, which is an error where CI=true."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.slurm import emulated
from tests.slurm.emulated import Cluster


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Slurm of four nodes of four CPUs, started once."""
    if absent := emulated.missing():
        pytest.skip(absent)
    folder = tmp_path_factory.mktemp("slurm")
    with emulated.running(folder) as cluster:
        yield cluster


@pytest.fixture
def cluster(slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The Slurm that this process's clients find, without any job; whatever a test leaves there is ended."""
    for name in set(os.environ) - set(emulated.inside(os.environ)):
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    yield slurm
    slurm.clear()
