"""The paper's searches against the exact one."""

from __future__ import annotations

from itertools import pairwise

import pytest

from harness.core.cluster import Cluster, Link
from harness.sbp.collective_costs import Collectives
from harness.sbp.device_grid import Grid
from harness.sbp.matmul_chain import Attention, Chain, Matmul, Residual
from harness.sbp.shortest_path import Search
from harness.sbp.strategy_costs import Costs, Rules
from planners.autoddl.heuristics import SEARCHES, SearchResult, find

WIDTHS = (32768, 16384, 4096, 2048, 512)


def search(p: int, paths: str = "paper", ends: str = "free", samples: int = 1024, widths=WIDTHS) -> Search:
    items = [
        Matmul(str(k), samples, a, b, samples * a, samples * b, 4 * a * b) for k, (a, b) in enumerate(pairwise(widths))
    ]
    cluster = Cluster(nodes=p, node_port=Link(1e-5, 1e-10))
    return Search(Chain(tuple(items), 4), Costs(Collectives(cluster, Grid(p, 1)), 4, 1, Rules(paths, "any")), ends)


@pytest.mark.parametrize("paths", ["paper", "mixed"])
@pytest.mark.parametrize("ends", ["free", "batch_split"])
@pytest.mark.parametrize("samples", [256, 1024, 8192])
def test_exhaustive_search_of_figure_8_finds_what_the_exact_one_finds(paths, ends, samples):
    one = search(128, paths, ends, samples)
    found = find(one, "exhaustive", 0, seed=0)
    assert found.evaluations == 36**4
    assert found.route.seconds == pytest.approx(one.route().seconds, rel=1e-9)


def test_exhaustive_search_of_a_branch_finds_what_the_exact_one_finds():
    samples, tokens, hidden = 8, 16, 64
    elements = samples * tokens * hidden
    branch = Residual((
        Matmul("qkv", samples, hidden, 3 * hidden, elements, 3 * elements, 12 * hidden**2),
        Attention(samples, 8, 3 * elements),
        Matmul("projection", samples, hidden, hidden, elements, elements, 4 * hidden**2),
    ), elements)  # fmt: skip
    last = Matmul("last", samples, hidden, 10, elements, samples * tokens * 10, 40 * hidden)
    one = Search(Chain((branch, last), 4), search(8, "mixed").costs, "free")
    assert find(one, "exhaustive", 0, seed=0).route.seconds == pytest.approx(one.route().seconds, rel=1e-9)


def relative(name: str, p: int, evaluations: int) -> list[float]:
    one = search(p)
    best = one.route().seconds
    return sorted(find(one, name, evaluations, seed).route.seconds / best for seed in range(10))


@pytest.mark.usefixtures("computation", "at_length")
@pytest.mark.parametrize(("p", "plans"), [(128, 36**4), (4096, 91**4)])
def test_figure_8_at_a_hundredth_of_all_plans_and_less(p, plans):
    """Claim AD-6: coordinate descent finds the optimum, Metropolis-Hastings is close, random plans are not."""
    descent = relative("coordinate_descent", p, min(plans // 100, 100_000))
    chain, drawn = (relative(name, p, min(plans // 100, 25_000)) for name in ("metropolis_hastings", "random"))
    assert max(descent) == pytest.approx(1.0)
    assert chain[5] <= 1.1
    assert drawn[5] > chain[5]


@pytest.mark.parametrize("name", [name for name in SEARCHES if name != "exhaustive"])
def test_a_search_is_as_its_seed_and_keeps_to_its_evaluations(name):
    def once(seed: int) -> SearchResult:
        return find(search(32), name, 500, seed)

    first, again, other = once(1), once(1), once(2)
    assert (first.history, first.route) == (again.history, again.route)
    assert first.history != other.history
    assert 500 <= first.evaluations < 500 + 4 * 21  # a sweep of coordinate descent ends
    counts, seconds = zip(*first.history, strict=True)
    assert list(counts) == sorted(counts)
    assert list(seconds) == sorted(seconds, reverse=True)
    assert first.route.seconds == pytest.approx(seconds[-1])
    assert len(first.elapsed_s) == len(first.history) and first.elapsed_s == sorted(first.elapsed_s)
    assert first.elapsed_s[0] > 0 and first.elapsed_s[-1] <= first.search_s
