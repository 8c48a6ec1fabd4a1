"""Clusters as the command line makes them."""

import pytest

from harness.cli.compose import compose
from harness.config import cluster_config
from harness.config.cluster_config import ClusterConfig
from harness.core.cluster import Cluster, Link
from harness.core.problem import CannotRun


def composed(*overrides: str) -> Cluster:
    """The cluster of a command line."""
    return cluster_config.build(ClusterConfig(**compose(overrides).cluster))


def refused(*overrides: str) -> list[str]:
    with pytest.raises(CannotRun) as caught:
        compose(overrides)
    return [problem.key for problem in caught.value.problems]


def gb_s(link: Link) -> float:
    return round(1e-9 / link.beta_s_per_byte, 3)
