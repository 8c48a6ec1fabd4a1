"""Every check of a composed configuration that needs neither a profile nor torch, all problems at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from omegaconf import DictConfig

from harness.checks import engine_support, request, stored_profile
from harness.config import cluster_config, registry
from harness.config.overrides import title
from harness.config.plain_config import plain
from harness.core.problem import UNNAMED, CannotRun, Problem, deduplicate
from harness.host import slurm_job
from harness.interfaces import Engine
from harness.launch import rank_starter

T = TypeVar("T")
Expected = Callable[[DictConfig], slurm_job.Allocation]
"""The environment in which a configuration will run: the Slurm job that it will be part of."""


def request_problems(config: DictConfig, overrides: Sequence[str], expected: Expected | None = None) -> list[Problem]:
    """Return the problems that cluster and engine find in a configuration whose values may be out of range.

    For a user who is reported those anyway: a check that such a value makes impossible is left out.
    """
    stored_profile.follow(config, overrides)
    with expecting(config, expected):
        return _against_request(config)


@contextmanager
def with_request(config: DictConfig, overrides: Sequence[str]) -> Iterator[None]:
    """What is refused within it, for other reasons, comes with the problems of the request itself."""
    try:
        yield
    except CannotRun as error:
        found = deduplicate([*error.problems, *request_problems(config, overrides)])
        named = title(config, overrides) if error.title == UNNAMED else error.title
        raise CannotRun(found, named) from error


def expecting(config: DictConfig, expected: Expected | None) -> AbstractContextManager[None]:
    """The job in which a configuration will run is this process's; nothing changes without one."""
    return slurm_job.expecting(_possible(lambda: expected(config), []) if expected else None)


def _against_request(config: DictConfig) -> list[Problem]:
    found: list[Problem] = []
    cluster = _possible(
        lambda: cluster_config.build(cluster_config.from_group(config.cluster), job=rank_starter.nodes(config)), found
    )
    if config.mode in ("profile", "calibrate"):
        return found + (_possible(lambda: request.profiling(config), found) or [])
    engine: Engine | None = _possible(lambda: registry.build("engine", config.engine), found)
    if engine:
        built, keys = engine, plain(config)  # an engine is asked about each number of stages
        if config.mode == "tune":
            found += _possible(lambda: engine_support.on_any_mesh(keys, built), found) or []
        else:
            found += _possible(lambda: engine_support.early(keys, built, cluster), found) or []
    return found


def _possible(build: Callable[[], T], found: list[Problem]) -> T | None:
    """Return the result of `build`; if a value makes it impossible, return None and add the problems to `found`."""
    try:
        return build()
    except CannotRun as error:
        found += error.problems
    except (ValueError, ArithmeticError):
        pass  # the value is a problem of its own
    return None
