"""The report: a section for each figure and table of which something was run, and one for the claims."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from analysis import changed_checks, claim_check
from analysis.autoddl import fig3_fig4, fig8, savings, table1
from analysis.autoddl.claim_checks import BILLION, DENSE, verdicts
from analysis.autoddl.fig9_fig10 import (
    CLOUD_VGG,
    LARGE,
    OURS,
    SCHEMES,
    SMALL,
    STAGED,
    TRANSFORMERS,
    VGG,
    VGG_AT,
    Setting,
    steps,
)
from analysis.autoddl.sweep_results import SWEEPS, Results, Row, fastest, largest, smallest
from analysis.paper_data import printed, texts
from analysis.report import MISSING, Section

COLLECTIVES = {
    "AllReduce": ("all_reduce",),
    "AllGather/ReduceScatter": ("all_gather", "reduce_scatter"),
    "AlltoAll": ("all_to_all",),
}
"""Ours, by the names of the paper's Table 2."""
VGG_GB_S = 4
"""GB/s of a node in Figure 9 (conf/cluster/piz_daint.yaml, effective)."""
OVERLAPPING = (
    "Simulated: no communication overlaps with computing, so that its shares are upper bounds. Each scheme has the "
    "largest micro-batches that fit, as in the paper; the next column has its fastest ones, with their number."
)


def sections(results: Results) -> list[Section]:
    """The tables of which something was run; the last one is that of the claims."""
    found = [make(results) for sweep in SWEEPS if results.was_run(sweep) for make in TABLES[sweep]]
    said = verdicts(results)
    return [*found, claim_check.section(said), *changed_checks.sections("autoddl", said)]


def _fig3(results: Results) -> Section:
    published = {name: fig3_fig4.published(name) for name in fig3_fig4.FIG3}
    rows = []
    for name, row in fig3_fig4.fig3(results).items():
        own, paper = fig3_fig4.elements(row) / BILLION, published[name]
        rows.append(
            (
                name,
                *(str(row.strategy[product]) for product in fig3_fig4.ATTENTION),
                MISSING if paper is None else f"{paper:g}",
                f"{own:g}",
            )
        )
    title = "Fig. 3: elements of a device in the forward pass of an attention layer, 64 nodes, in 2^30"
    notes = (
        "Both strategies of the paper by hand, and what planner=autoddl finds with weights on four nodes each "
        "(planner.max_replicas=4).",
    )
    return Section(title, ("strategy", "QKV", "projection", "paper", "planned"), tuple(rows), notes, texts=3)


def _table2(results: Results) -> Section:
    rows = []
    for row in results.rows("table2"):
        if row.ok and row.record:
            m = row.record.metrics
            r2 = (f"{m[which][m['weights']]:.3f}" for which in ("r2", "r2_large"))
            link = f"{1e6 * m['alpha_s']:.1f} us", f"{m['bandwidth_gb_s']:.2f} GB/s"
            rows.append((row["cluster.devices"], *link, m["weights"], *r2))
    title = "Table 2: alpha and beta of the collectives' rings, fitted on this machine"
    columns = ("processes", "alpha", "1 / beta", "errors", "R^2", "R^2 of large messages")
    return Section(title, columns, tuple(rows), ("All four collectives have one alpha and one beta.",))


def _costs(results: Results) -> Section:
    printed = {name: _cost(scheme) for scheme, names in COLLECTIVES.items() for name in names}
    rows = []
    for row in results.rows("table2"):
        if row.ok and row.record:
            r2 = row.record.metrics["r2_large"]
            rows += [(row["cluster.devices"], name, printed[name], f"{r2[name]:.3f}") for name in printed if name in r2]
    title = "Table 2: costs of collectives, each fitted by itself on this machine"
    columns = ("processes", "collective", "paper", "R^2 of large messages")
    notes = ("The paper's formulas as they are meant; as printed they have ceilings in place of parentheses.",)
    return Section(title, columns, tuple(rows), notes, texts=3)


def _cost(scheme: str) -> str:
    return texts("autoddl_table2_collectives", "cost_intended", scheme=scheme)[0]


def _table1(results: Results) -> Section:
    rows = []
    for method, values in table1.published().items():
        scheme = table1.SCHEMES.get(method)
        rows.append((method, *values, *(_checked(results, scheme) if scheme else (MISSING, MISSING))))
    columns = (
        "method",
        "models",
        "asymptotically optimal",
        "search cost",
        "adaptation",
        "fits here",
        "communication / AutoDDL's",
    )
    notes = (
        "The first five columns are the paper's. Fits here: of the settings of Figures 9 and 10. Methods that this "
        "project has not cannot be checked; nor can the ease of adaptation.",
        "Optimality: see claim AD-5; cost of search: see Figure 8.",
    )
    return Section("Table 1: methods", columns, tuple(rows), notes, texts=5)


def _checked(results: Results, scheme: str) -> tuple[str, str]:
    """Return the cells "fits in so many settings" and "sends so much"."""
    (fitting, ran), sent = table1.fits(results, scheme), table1.sends(results, scheme)
    return f"{fitting} of {ran}", f"{sent[0]:.2f} to {sent[1]:.2f}" if sent else MISSING


def _fig4(results: Results) -> Section:
    rows, notes = [], []
    for devices in (2, 4):
        ranked = fig3_fig4.fig4(results, devices)
        order = sorted(ranked, key=lambda one: one.measured_s)
        for number, one in enumerate(ranked, start=1):
            rows.append(
                (
                    str(devices),
                    one.title,
                    f"{1e3 * one.predicted_s:.2f} ms",
                    f"{1e3 * one.measured_s:.1f} ms",
                    f"{number} -> {order.index(one) + 1}",
                )
            )
        if ranked:
            notes.append(f"{devices} processes: Kendall's tau {fig3_fig4.tau(ranked):.2f}.")
    count = printed(fig3_fig4.RANKING, "strategies_ranked")
    nodes = {place: printed(fig3_fig4.RANKING, "nodes", case=place) for place in ("Piz Daint", "Google Cloud")}
    text = " and ".join(f"{number:g} nodes of {place}" for place, number in nodes.items())
    notes.append(f"The paper: {count:g} strategies, on {text} in the predicted order.")
    notes.append("Measured: what a step spends in collectives, which the processes enter together.")
    link, *_ = results.rows("fig4")
    text = f"{1e6 * float(link['cluster.alpha_s']):g} us and {link['cluster.bandwidth_gb_s']} GB/s"
    notes.append(f"Predicted with {text} for all collectives, as the sweep says (Table 2 fits them).")
    title = "Fig. 4: eight strategies of a Transformer layer, by predicted communication"
    columns = ("processes", "strategies", "predicted", "measured", "place")
    return Section(title, columns, tuple(rows), tuple(notes), texts=2)


def _fig7(results: Results) -> Section:
    run = (row for row in results.rows("fig7") if row.ok)
    rows = [(row["planner.paths"], *(str(row.strategy[name]) for name in DENSE)) for row in run]
    title = "Fig. 7: (p0, p1, p2) of VGG13's dense layers on 32 nodes, batch 256"
    return Section(
        title,
        ("planner.paths", "25088 x 4096", "4096 x 4096", "4096 x 1000"),
        tuple(rows),
        ("The paper: no weight is replicated, p0 = 1.",),
        texts=4,
    )


def _fig8(results: Results) -> Section:
    rows, at = [], (100, 1000, fig8.EVALUATIONS)
    for nodes in fig8.NODES:
        for batch in fig8.BATCHES:
            for name, title in fig8.SEARCHES.items():
                of_search = fig8.curves(results, nodes, batch, name)
                if of_search:
                    ends = [curve.at(fig8.EVALUATIONS) for curve in of_search]
                    medians = (f"{fig8.middle(of_search, plans):.3f}" for plans in at)
                    found = sum(end <= 1 + 1e-9 for end in ends)
                    timed = _after(results, nodes, batch, of_search)
                    rows.append((nodes, batch, title, *medians, f"{max(ends):.3f}", f"{found} of {len(ends)}", *timed))
    whole = [(batch, fig8.exhaustive(results, batch)) for batch in fig8.BATCHES]
    text = ", ".join(f"{ratio:.9f} (batch {batch})" for batch, ratio in whole if ratio is not None)
    notes = [f"The best of all 36^4 plans of 128 nodes costs {text} times the proven optimum."] if text else []
    low, high, count = (
        printed(fig8.FILE, name)
        for name in ("heuristic_speedup_over_exhaustive_low", "heuristic_speedup_over_exhaustive_high", "runs")
    )
    notes.append(
        f"The paper has curves of {count:g} runs, and says of the heuristics that they are {low:g} to {high:g} orders "
        "of magnitude faster than to look at all plans."
    )
    title = "Fig. 8: communication of the best plan found / proven optimum, median of ten seeds"
    shares = (f"measured: after {share:g} of the time" for share in fig8.SHARES)
    columns = ("nodes", "batch", "search", *(f"after {plans:,}" for plans in at), "worst seed", "optimal", *shares)
    return Section(title, columns, tuple(rows), (*notes, *_times(results)), texts=3)


def _after(results: Results, nodes: str, batch: str, of_search: Sequence[fig8.Curve]) -> Iterator[str]:
    """The median costs after shares of the time to look at all plans."""
    whole_s = fig8.one_by_one_s(results, nodes, batch)
    for share in fig8.SHARES:
        cost = fig8.middle_after(of_search, share * whole_s) if whole_s else float("inf")
        yield f"{cost:.3f}" if cost < float("inf") else MISSING


def _times(results: Results) -> Iterator[str]:
    """What the columns of time mean."""
    batch = fig8.BATCHES[0]
    times = [seconds for nodes in fig8.NODES if (seconds := fig8.one_by_one_s(results, nodes, batch))]
    if len(times) < len(fig8.NODES):
        return
    whole = " and ".join(f"{seconds:.3g} s" for seconds in times)
    yield (
        f"The time is that of all plans one at a time, at the measured time of a random plan: {whole} on "
        f"{' and '.join(fig8.NODES)} nodes (batch {batch}). Searches end after {fig8.EVALUATIONS:,} plans."
    )
    if (blocks_s := fig8.in_blocks_s(results, batch)) is not None:
        yield f"This project's exhaustive search looks at plans in blocks: {blocks_s:.2g} s on 128 nodes, measured."


def _schemes(title: str, settings: Sequence[Setting]) -> Callable[[Results], Section]:
    """A table of schemes on some models."""

    def make(results: Results) -> Section:
        figures = (
            "micro-batches",
            "communication",
            "step",
            "with the fastest",
            "of AutoDDL's step",
            "paper saves: communication",
            "paper saves: step",
        )
        columns = ("", "scheme", *figures)
        rows = tuple(row for setting in settings for row in _compared(results, setting))
        return Section(title, columns, rows, tuple(dict.fromkeys(_basis(results, settings))), texts=2)

    return make


def _bandwidths(results: Results) -> Section:
    """What VGG13's times are with other networks."""
    rows = []
    for gb_s, settings in {f"{VGG_GB_S}": VGG, **VGG_AT}.items():
        for setting in settings:
            seconds = setting.seconds(results, steps)
            if {OURS, "Megatron-like", "data parallel"} <= seconds.keys():
                saved = f"{100 * (1 - seconds[OURS] / seconds['Megatron-like']):.1f} %"
                slower = f"{seconds['data parallel'] / seconds[OURS]:.2f}"
                rows.append((f"{gb_s} GB/s", setting.title, saved, f"{savings.step_saving(setting):g} %", slower))
    columns = ("bandwidth of a node", "", "saved", "paper saves", "data parallelism / AutoDDL")
    notes = (
        f"Simulated. {VGG_GB_S} GB/s follow from the Transformers' times, 2 GB/s would from VGG13's own, 10 GB/s are "
        "the data sheet's. The paper: data parallelism is about 4 times slower.",
    )
    return Section("Fig. 9: VGG13 with other networks, against Megatron-like", columns, tuple(rows), notes, texts=2)


def _compared(results: Results, setting: Setting) -> Iterator[tuple[str, ...]]:
    """A line for each scheme: the point that counts, and that with the fastest micro-batches."""
    ours = setting.chosen(results, OURS)
    for number, scheme in enumerate(SCHEMES):
        rows = setting.rows(results, scheme)
        own, fast = largest(rows), fastest(rows)
        title = "" if number else setting.title
        if own is None or fast is None:
            yield title, scheme, MISSING, _why(rows), *[MISSING] * 5
            continue
        ratio = f"{own.step_s / ours.step_s:.3f}" if ours else MISSING
        cells = (str(own.micro_batches), _seconds(own.communication_s), _seconds(own.step_s))
        fast_step = f"{_seconds(fast.step_s)} ({fast.micro_batches})"
        yield title, scheme, *cells, fast_step, ratio, *(_saved(setting) if scheme == OURS else [MISSING] * 2)


def _why(rows: Sequence[Row]) -> str:
    """Why no point counts: in the words of the last one."""
    if not all(row.ran for row in rows):
        return "not run"
    reasons = " ".join(row.record.reason for row in rows if row.record)
    return "does not fit" if "needs" in reasons else "cannot be split"


def _basis(results: Results, settings: Sequence[Setting]) -> Iterator[str]:
    for setting in settings:
        for scheme in SCHEMES:
            row = setting.chosen(results, scheme)
            if row and row.record:
                basis = row.record.manifest.get("simulation", {})
                port = 1e-9 / basis["cluster"]["node_port"]["beta_s_per_byte"]
                yield f"Layer times {basis['layer_times']}; {port:g} GB/s for each node."
    if SMALL in settings:
        (said,) = texts(savings.FILES["fig10"], "claim", model=savings.MODELS[SMALL.model])
        yield f"The paper, of {SMALL.title}: {said}."
    yield OVERLAPPING


def _saved(setting: Setting) -> tuple[str, ...]:
    """Return the savings of communication and of a step that the paper prints."""
    shares = (savings.communication_saving(setting), savings.step_saving(setting))
    return tuple(MISSING if one is None else f"{one:g} %" for one in shares)


def _table3(results: Results) -> Section:
    rows = []
    for staged in STAGED:
        for scheme, planner in (("Megatron", "megatron"), ("AutoDDL", "autoddl")):
            by_pick = [staged.times(results, planner, pick) for pick in (smallest, fastest)]
            own = [MISSING if n not in times else _seconds(times[n]) for times in by_pick for n in (1, 2, 4)]
            paper, stages = (staged.published(metric, scheme) for metric in ("time", "optimal_pipeline_stages"))
            rows.append((staged.title, scheme, *own, f"{paper:g} s", f"{stages:g}"))
    title = "Table 3: a step with pipeline stages"
    counts = (f"{count} stage{'s' * (count > 1)}{which}" for which in ("", ", fastest") for count in (1, 2, 4))
    columns = ("", "scheme", *counts, "paper", "its stages")
    notes = (
        "All columns but the last two are simulated: with the smallest micro-batches that can be split, as in the "
        "paper, then with the fastest. The network is fitted on the Transformers' times, this table's among them.",
    )
    return Section(title, columns, tuple(rows), notes, texts=2)


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "does not fit"
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


TABLES: dict[str, tuple[Callable[[Results], Section], ...]] = {
    "fig3": (_fig3,),
    "table2": (_table2, _costs),
    "fig4": (_fig4,),
    "fig7": (_fig7,),
    "fig8": (_fig8,),
    "fig9": (
        _table1,
        _schemes("Fig. 9: VGG13 on Piz Daint", VGG),
        _bandwidths,
        _schemes("Fig. 9: Transformers on Piz Daint", TRANSFORMERS),
    ),
    "fig10": (_schemes("Fig. 10: two nodes of Google Cloud", (*CLOUD_VGG, SMALL, LARGE)),),
    "table3": (_table3,),
}
"""Tables by the sweep that each needs."""
