"""The report: a section for each table and figure, what each mechanism brings, what was measured in small, claims."""

from __future__ import annotations

from analysis import changed_checks, claim_check, run_artifacts
from analysis.myelin import ablation, local_runs, quantities
from analysis.myelin.claim_checks import verdicts
from analysis.myelin.sweep_results import GB, GPUS, LOCAL, MYELIN, Results, Row
from analysis.paper_data import printed, texts, value
from analysis.report import MISSING, Section

READ_OFF = "Paper: read off the plots of the published version (IPDPS 2022), whose text has few of the values."
SIMULATED = "Simulated on Summit as the paper describes it, with links and the one efficiency as its timings imply."


def sections(results: Results) -> list[Section]:
    """The tables of which something was run; the last ones are those of the claims."""
    said = verdicts(results)
    makers = {
        "table1": _table1,
        "fig5": _fig5,
        "fig6": _fig6,
        "fig8": _fig8,
        "fig9": _fig9,
        "table2": _table2,
        "fig10": _fig10,
        "fig11": _fig11,
    }
    found = [make(results) for sweep, make in makers.items() if results.good(sweep)]
    found += [*ablation.sections(results), *local_runs.sections(results)]
    return [*found, claim_check.section(said), *changed_checks.sections("myelin", said)]


def _table1(results: Results) -> Section:
    own, rows = results.good("table1") + results.good("table1", LOCAL), []
    for row in own:
        paper = quantities.published_parameters(row)
        model = row.config["model"]
        rows.append(
            (
                row.size,
                f"{model['layers']}",
                f"{model['hidden']}",
                f"{model['heads']}",
                _number(paper and paper / 1e9, "{:g}"),
                *_counted(row),
            )
        )
    columns = ("model", "layers", "hidden", "heads", "paper, 1e9", "counted, 1e9", "counted")
    note = "No reading of the paper gives its count of GPT-2 small."
    missing = run_artifacts.missing_files(own, lambda row: row.parameters)
    return Section("Table I: parameters", columns, tuple(rows), (note, *missing))


def _counted(row: Row) -> tuple[str, str]:
    """Parameters in 1e9, and exactly."""
    count = run_artifacts.optional(lambda row: row.parameters, row)
    return (MISSING, MISSING) if count is None else (f"{count / 1e9:.3f}", f"{count:,}")


def _fig5(results: Results) -> Section:
    rows = []
    for row in results.good("fig5"):
        ours = row.phase_s("pipelining")
        paper = quantities.published_batch_s(row.mesh.pipeline)
        grid = f"G_inter={row.mesh.pipeline} G_data={row.mesh.data} micro_batch_size=1"
        theirs = value(quantities.STAGES, "inter_layer_share_of_batch_time", case=grid)
        ratio, share = ours / paper if paper else None, 100 * ours / row.step_s
        rows.append(
            (
                f"{row.mesh.pipeline} x {row.mesh.data}",
                _number(paper, "{:.1f}"),
                f"{ours:.1f}",
                _number(ratio, "{:.2f}"),
                _number(theirs, "{:g} %"),
                f"{share:.0f} %",
            )
        )
    columns = (
        "G_inter x G_data",
        "paper, s",
        "simulated, s",
        "simulated / paper",
        "paper: of its whole step",
        "simulated: of its whole step",
    )
    notes = (READ_OFF, SIMULATED, "Without the data-parallel phase and the optimizer: the pipelining phase alone.")
    return Section("Fig. 5: batch time against G_inter, 12B, batch 2048, micro-batch 1", columns, tuple(rows), notes)


def _fig6(results: Results) -> Section:
    rows: list[tuple[str, ...]] = []
    for row in results.good("fig6"):
        memopt, scheme = row["engine.offload"] == "true", quantities.memory_scheme(row)
        grid = f"{row.mesh.pipeline} x {row.mesh.data}"
        name = f"{grid}, {scheme.split()[0]}"
        drawn = not memopt or row.mesh.pipeline == 6
        for phase in quantities.PHASES:
            published = _number(quantities.published_phase_s(row, phase) if drawn else None, "{:.2f}")
            rows.append((name, f"{phase.replace('_', ' ')}, s", published, f"{row.phase_s(phase):.2f}"))
        rows.append((name, "step, s", MISSING, f"{row.step_s:.2f}"))
        memory = quantities.published_memory_gb(row) if row.mesh.pipeline == 24 else None
        rows.append((name, "memory of all devices, GB", _number(memory, "{:.1f}"), f"{row.total_bytes / GB:.1f}"))
        paper = None if memopt else quantities.published_bytes()[0]
        rows.append(
            (
                name,
                "model state, bytes a parameter",
                _number(paper, "{:g}"),
                f"{quantities.state_of_a_parameter(row):.2f}",
            )
        )
    notes = (
        SIMULATED,
        "Memory is accounted, not measured. Of model state there are 4 bytes a parameter with the optimization, and 16 "
        "for each of bsize = 16e6 parameters on each device. Optimizer times are read off the plots of IPDPS 2022.",
    )
    title = "Fig. 6 and Sec. V-B: phases and memory without and with the memory optimization, 12B, batch 2048"
    return Section(title, ("G_inter x G_data, memopt", "", "paper", "simulated"), tuple(rows), notes, texts=2)


def _fig8(results: Results) -> Section:
    rows, alone = [], quantities.published_tail_s()
    for row in results.good("fig8"):
        k = int(row["engine.k"])
        paper = quantities.published_overlapped_s(k)
        rows.append(
            (
                f"{k}" if k else "no overlap",
                _number(paper, "{:.2f}"),
                f"{quantities.tail_s(row):.2f}",
                f"{row.phase_s('data_parallel'):.2f}",
                f"{row.phase_s('optimizer'):.2f}",
            )
        )
    columns = ("k", "paper, s", "simulated, s", "of it sums, s", "of it updates, s")
    note = (
        f"Paper without overlap: {alone[0]:.2f} s of sums, {alone[1]:.2f} s of updates. With overlap both run at once."
    )
    title = "Fig. 8: sums over replicas and updates in chunks of k buckets"
    return Section(title, columns, tuple(rows), (note, READ_OFF))


def _fig9(results: Results) -> Section:
    rows, own = [], results.good("fig9")
    for row in own:
        held = run_artifacts.optional(lambda row: row.in_flight, row)
        rows.append(
            (
                f"{row.mesh.size}",
                row["engine"],
                f"{row.mesh.pipeline} x {row.mesh.data}",
                f"{row.step_s:.2f}",
                f"{max(row.metrics['peak_memory_bytes']) / GB:.1f}",
                _number(held, "{:g}"),
            )
        )
    (said,), batch = texts(quantities.VALIDATION, "claim"), own[0]["batch.size"]
    columns = ("GPUs", "engine", "G_inter x G_data", "simulated step, s", "fullest device, GB", "in flight")
    notes = (
        f"The paper: {said}, with G_inter = {printed(quantities.VALIDATION, 'G_inter'):g}. The batch, {batch} here, it "
        "does not say.",
        f"{SIMULATED} A simulation has no losses, so this is what the two runs cost; losses were measured in small.",
        *run_artifacts.missing_files(own, lambda row: row.in_flight),
    )
    return Section("Fig. 9: the two runs of the validation, GPT-2 small", columns, tuple(rows), notes, texts=3)


def _table2(results: Results) -> Section:
    rows = []
    for row in results.good("table2"):
        theirs = [
            value("myelin_table2_tuning", metric, scheme=row.framework, model=f"GPT-like {row.size}")
            if (metric, row.framework) != ("G_intra", MYELIN)
            else 1.0
            for metric in ("micro_batch_size", "G_intra", "G_inter", "G_data")
        ]
        rows.append(
            (
                row.size,
                row.framework,
                " / ".join(_number(one, "{:.0f}") for one in theirs),
                local_runs.configuration(row),
                f"{row.step_s:.1f}",
            )
        )
    columns = ("model", "framework", "paper", "tuned", "simulated step, s")
    note = "Micro-batch / G_intra / G_inter / G_data. Tuned: the fastest in simulation of those that fit."
    return Section("Table II: the fastest configurations", columns, tuple(rows), (note,), texts=4)


def _fig10(results: Results) -> Section:
    rows = [(row.size, f"{GPUS[row.size]}", row.framework, *_speed(row, "Fig. 10")) for row in results.good("fig10")]
    columns = (
        "model",
        "GPUs",
        "framework",
        "simulated step, s",
        "paper, days",
        "simulated, days",
        "paper, % of peak",
        "simulated, % of peak",
        "fullest device, GB",
    )
    notes = (
        READ_OFF,
        SIMULATED,
        "Days of training on 300e9 words, percent of 125 TFLOP/s a GPU counting recomputation, by the paper's formulas."
        " Calibrated: the 12B Myelin point, and the links of nodes and hosts on the phases of Fig. 6; all others are "
        "predictions. Memory as accounted, of 16 GB.",
    )
    return Section(
        "Fig. 10: weak scaling in the configurations of Table II, batch 16384", columns, tuple(rows), notes, texts=3
    )


def _fig11(results: Results) -> Section:
    rows = []
    for row in results.good("fig11"):
        speed = _speed(row, "Fig. 11")
        rows.append((f"{row.mesh.size}", row["batch.size"], row.framework, speed[0], speed[1], speed[2], speed[4]))
    columns = (
        "GPUs",
        "batch",
        "framework",
        "simulated step, s",
        "paper, days",
        "simulated, days",
        "simulated, % of peak",
    )
    return Section(
        "Fig. 11: strong scaling of 12B; the batch grows with the GPUs",
        columns,
        tuple(rows),
        (READ_OFF, SIMULATED),
        texts=3,
    )


def _speed(row: Row, figure: str) -> tuple[str, ...]:
    """Step, days and percent of peak: paper and simulated; the fullest device."""
    days, percent = (
        quantities.published_scaling(row, figure, metric) for metric in (quantities.DAYS, quantities.PERCENT)
    )
    fullest = max(row.metrics["peak_memory_bytes"]) / GB
    return (
        f"{row.step_s:.1f}",
        _number(days, "{:.1f}"),
        f"{quantities.days(row):.1f}",
        _number(percent, "{:.1f}"),
        f"{quantities.percent_of_peak(row):.1f}",
        f"{fullest:.1f}",
    )


def _number(figure: float | None, form: str) -> str:
    return MISSING if figure is None else form.format(figure)
