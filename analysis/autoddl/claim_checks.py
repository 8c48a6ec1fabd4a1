"""Whether each claim of paper_claims/autoddl.csv holds for our figures. One function for each."""

from __future__ import annotations

from analysis.autoddl import cube_volume, fig3_fig4, fig8, scheme_claims
from analysis.autoddl.fig9_fig10 import CLOUD_VGG, LARGE, SMALL, TRANSFORMERS, VGG
from analysis.autoddl.sweep_results import Results, Row
from analysis.claim_check import Check, Finding, Verdict, check_claims
from analysis.match_records import Need
from analysis.paper_data import printed, texts
from analysis.records import sweep_command
from analysis.run_artifacts import MissingData
from harness.simulator.routes import STEPS

DENSE = ("classifier_0_Linear", "classifier_3_Linear", "classifier_6_Linear")
BILLION = 2**30
TESTS = {
    "AD-1": (
        "tests/harness/sbp/test_published.py::test_figure_3_volumes",
        "tests/harness/sbp/test_published.py::test_figure_3_is_the_least_volume_with_weights_on_4_nodes_each",
    ),
    "AD-2": ("tests/harness/measure/test_alpha_beta_fit.py::test_exact_timings_give_alpha_and_beta_back",),
    "AD-4": ("tests/engines/sbp/test_training.py::test_every_strategy_on_eight_ranks_in_every_layer",),
    "AD-5": ("tests/harness/sbp/test_published.py::test_volume_and_memory_of_cubes_at_the_papers_devices",),
    "AD-6": ("tests/planners/autoddl/test_heuristics.py::test_figure_8_at_a_hundredth_of_all_plans_and_less",),
    "AD-7": ("tests/harness/sbp/test_published.py::test_figure_7_replicates_no_dense_weight_of_vgg13",),
}
"""Tests that prove claims, or part of them, exactly."""
REASONS = {
    "AD-2": "the collectives of processes on one machine are no rings over equal links: each by itself has an alpha "
    "and a beta that fit, all together have not.",
    "AD-3": "strategies whose predictions are a tenth apart change places from run to run (taus of 0.71 to 0.86 in "
    "three), as the processes share two cores; one pair is 39 % apart and takes the same time (two layers over pairs "
    "of processes, or over all four). Four machines with a network of their own would decide it.",
    "AD-10": "where all GPUs of a node split weights, less crosses the nodes than with data parallelism, with any "
    "latency and bandwidth. The paper's Megatron-like was slower, and unstable; a trace of it would tell why.",
    "AD-11": "SUMMA is 2.9 times slower, not 3, with the data sheet's 12.5 GB/s between the nodes; with half of it "
    "both figures of the large model are within their limits. The bandwidth of two such servers would decide it.",
    "AD-12": "a stage of fewer devices sends less for each layer, and nothing but messages and the bubble is lost "
    "between our stages. The paper's micro-batches, meshes and calls for each stage would decide it: at its 2 stages "
    "the deep model takes 0.42 to 0.53 of its time here.",
}
"""Why a claim may not hold."""


def verdicts(results: Results) -> list[Verdict]:
    """A verdict for each claim."""
    return check_claims("autoddl", results, CLAIMS, TESTS, REASONS)


def attention_volumes(results: Results) -> Finding:
    rows = fig3_fig4.fig3(results)
    volumes = {name: fig3_fig4.elements(row) / BILLION for name, row in rows.items()}
    strategies = [rows["found here"].strategy[name] for name in fig3_fig4.ATTENTION]
    right = [volumes[name] for name in fig3_fig4.FIG3] == [3.75, 2.0, 2.0] and strategies == [(4, 8, 2), (4, 4, 4)]
    summary = ", ".join(f"{name} {volume:g}" for name, volume in volumes.items())
    summary += f" x 2^30 elements; found QKV {strategies[0]}, projection {strategies[1]}"
    theirs = ", ".join(f"{name} {fig3_fig4.published(name):g}" for name in fig3_fig4.FIG3[:2])
    return Finding(right, f"{theirs} x 2^30 elements", summary)


def links_are_fitted(results: Results) -> Finding:
    rows = results.rows("table2")
    parts, right = [], True
    for row in rows:
        metrics = row.record.metrics if row.record else {}
        every = metrics["r2_large"]
        r2, alone = every[metrics["weights"]], [value for name, value in every.items() if name in STEPS]
        right &= r2 > 0.9
        parts.append(f"{row['cluster.devices']} processes {r2:.3f}")
        parts[-1] += f" (each collective by itself {min(alone):.3f} and more)" if alone else ""
    figures = f"R^2 of large messages, one alpha and beta for all collectives: {', '.join(parts)}"
    return Finding(right, measured=figures)


def order_of_strategies(results: Results) -> Finding:
    ranked = {devices: fig3_fig4.fig4(results, devices) for devices in (2, 4)}
    taus = {devices: fig3_fig4.tau(rows) for devices, rows in ranked.items()}
    apart = max(fig3_fig4.apart(rows) for rows in ranked.values())
    summary = (
        f"Kendall's tau {taus[2]:.2f} on 2 processes, {taus[4]:.2f} on 4; of pairs in another order the predictions "
        f"differ by {100 * apart:.0f} % at most"
    )
    count = printed(fig3_fig4.RANKING, "strategies_ranked")
    return Finding(min(taus.values()) >= 0.8, f"equal orders of {count:g} strategies", measured=summary)


def volume_of_cubes(results: Results) -> Finding:
    """Needs no record. Theta: bounded from both sides by n^2 / p^(2/3), for all p."""
    volumes, memories = cube_volume.volumes(), cube_volume.memories()
    bounds = [cube_volume.bound_ratio(sizes) for sizes in (volumes, memories)]
    slopes = [cube_volume.slope(sizes) for sizes in (cube_volume.without_own_share(volumes), memories)]
    right = max(bounds) <= 2 and all(abs(found + 2 / 3) < 0.005 for found in slopes)
    summary = (
        f"over {', '.join(map(str, volumes))} devices volume / (n^2/p^(2/3)) differs by a factor {bounds[0]:.3f}, "
        f"memory by {bounds[1]:.3f}; log-log slopes: memory {slopes[1]:.3f}, volume / ((k-1)/k) {slopes[0]:.3f}, "
        f"volume as it is {cube_volume.slope(volumes):.3f}"
    )
    (theirs,) = texts("autoddl_setup_and_text", "asymptotic_cost_autoddl")
    return Finding(right, f"Theta({theirs})", summary)


def searches(results: Results) -> Finding:
    """Judged by the number of plans and by time; both relative to looking at all plans one at a time."""
    found = {name: fig8.curves(results, *fig8.CLAIMED, name) for name in fig8.SEARCHES}
    whole_s, blocks_s = fig8.one_by_one_s(results, *fig8.CLAIMED), fig8.in_blocks_s(results, fig8.CLAIMED[1])
    if whole_s is None:
        raise MissingData(f"the records have no times of searches: {sweep_command('autoddl_fig8')}")
    every = fig8.PLANS[fig8.CLAIMED[0]]
    by_plans = {share: [fig8.middle(of, round(share * every)) for of in found.values()] for share in fig8.SHARES}
    by_time = {share: [fig8.middle_after(of, share * whole_s) for of in found.values()] for share in fig8.SHARES}
    judged = by_plans[fig8.SHARES[0]], by_time[fig8.SHARES[0]]
    right = all(descent <= 1 + 1e-9 and chain <= 1.1 and drawn > chain for descent, chain, drawn in judged)
    names = ", ".join(fig8.SEARCHES.values())
    summary = f"{names}, medians of ten seeds, times the optimum, 128 nodes: {_of_shares(by_plans, 'plans')}"
    blocks = "" if blocks_s is None else f"; this project's exhaustive search in blocks takes {blocks_s:.2g} s"
    timed = f"{_of_shares(by_time, f'the {whole_s:.3g} s that all plans one at a time take')}{blocks}"
    return Finding(right, "coordinate descent 1, Metropolis-Hastings next to it, random not", summary, timed)


def _of_shares(by_share: dict[float, list[float]], of: str) -> str:
    parts = (f"{', '.join(f'{cost:.3f}' for cost in costs)} after {share:g}" for share, costs in by_share.items())
    return f"{'; '.join(parts)} of {of}"


def dense_weights_are_not_replicated(results: Results) -> Finding:
    rows = results.rows("fig7")
    by_paths = {row["planner.paths"]: [row.strategy[name] for name in DENSE] for row in rows}
    summary = "; ".join(f"{paths} {' '.join(map(str, strategies))}" for paths, strategies in by_paths.items())
    return Finding(all(parts[0] == 1 for strategies in by_paths.values() for parts in strategies), "p0 = 1", summary)


def _searched(row: Row) -> bool:
    return (row["cluster.nodes"], row["batch.size"]) == fig8.CLAIMED


CLAIMS: dict[str, Check[Results]] = {
    "AD-1": Check(attention_volumes, (Need("fig3"),)),
    "AD-2": Check(links_are_fitted, (Need("table2"),)),
    "AD-3": Check(order_of_strategies, (Need("fig4"),)),
    "AD-5": Check(volume_of_cubes),
    "AD-6": Check(searches, (Need("fig8", keep=_searched),)),
    "AD-7": Check(dense_weights_are_not_replicated, (Need("fig7"),)),
    "AD-8": Check(scheme_claims.vgg_on_piz_daint, scheme_claims.of_settings(VGG)),
    "AD-9": Check(scheme_claims.transformers_on_piz_daint, scheme_claims.of_settings(TRANSFORMERS)),
    "AD-10": Check(scheme_claims.vgg_on_google_cloud, scheme_claims.of_settings(CLOUD_VGG)),
    "AD-11": Check(scheme_claims.transformers_on_google_cloud, scheme_claims.of_settings((SMALL, LARGE))),
    "AD-12": Check(scheme_claims.with_pipeline_stages, (Need("table3", ok=False),)),
}
