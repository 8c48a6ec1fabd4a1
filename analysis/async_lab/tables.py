"""Tables: the loss of each method at equal tokens and at equal time, and the pipelines that the times are of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from analysis import report
from analysis.async_lab.runs import LAST, SIMULATED, Times, Trained, mean, pipelines, trained, updates_at_equal_time
from analysis.records import Loaded
from analysis.report import MISSING, Section
from harness.config.registry import ROOT
from harness.core.units import seconds

PAGE = ROOT / "docs" / "results" / "async_lab.md"
BEGIN, END = "<!-- python -m analysis.async_lab --write -->", "<!-- end of the tables -->"
COLUMNS = ("optimizer", "method", "stages", "weights", "loss", "spread", "over flush", "at equal time", "diverged")


def sections(loaded: Loaded) -> list[Section]:
    """A table for each model, and one of the pipelines."""
    runs, times = trained(loaded.records), pipelines(loaded.records)
    models = list(dict.fromkeys(one.scheme.model for one in runs))
    found = [
        _section(model, [one for one in runs if one.scheme.model == model], of_model(model, times)) for model in models
    ]
    return [*found, *_pipelines(times)]


def of_model(model: str, times: Times) -> Times:
    """The pipelines that stand for a model: those of a GPT for no other one."""
    return times if model.startswith(SIMULATED) else {kind: {} for kind in times}


def _section(model: str, runs: Sequence[Trained], times: Times) -> Section:
    synchronous = {one.scheme.optimizer: one for one in runs if one.scheme.synchronous}
    depths = sorted({one.scheme.stages for one in runs if one.scheme.stages})
    rows = []
    for one in runs:
        base = synchronous.get(one.scheme.optimizer)
        alone = one.scheme.synchronous
        simulated = times["periodic"] and not alone
        rows.append(_row(one, base, _text(mean(one.last())) if simulated else MISSING))
        for depth in [one for one in depths if alone and one in times["periodic"] and one in times["1f1b"]]:
            count = updates_at_equal_time(one.scheme, len(one.losses[0]), times, depth)
            name = f"{one.scheme.method}, {count} updates"
            rows.append((one.scheme.optimizer, name, str(depth), "", "", "", "", _text(mean(one.last(count))), ""))
    counts = {len(losses) for one in runs for losses in one.losses}
    seeds = {len(one.losses) for one in runs}
    notes = (
        f"Loss: mean over {_range(seeds)} seeds of the last {LAST} of {_range(counts)} updates, on one device. Over "
        "flush: how much more than synchronous training with the same optimizer. Spread: of the seeds' losses. "
        "Weights: copies in a stage, on average.",
        "At equal time: the loss when the simulated pipeline of so many stages that does not drain has made its "
        "updates; a synchronous one (flush) has made fewer by then.",
    )
    return Section(f"{model}: loss at equal tokens and at equal time", COLUMNS, tuple(rows), notes, texts=2)


def _row(one: Trained, base: Trained | None, at_equal_time: str) -> tuple[str, ...]:
    losses, scheme = one.last(), one.scheme
    spread = max(losses) - min(losses) if len(losses) > 1 and math.isfinite(max(losses)) else math.nan
    more = mean(losses) - mean(base.last()) if base and base is not one else math.nan
    return (
        scheme.optimizer,
        scheme.method,
        str(scheme.stages) if scheme.stages else "any",
        f"{one.copies:.3g}",
        _text(mean(losses)),
        _text(spread),
        f"{more:+.3f}" if math.isfinite(more) else MISSING,
        at_equal_time,
        f"{one.diverged} of {len(losses)}",
    )


def _text(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else MISSING


def _range(numbers: Iterable[int]) -> str:
    found = sorted(set(numbers))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _pipelines(times: Times) -> list[Section]:
    """Seconds of an update, and what devices do in it; empty if nothing was simulated."""
    columns = ("pipeline", "stages", "an update", "over 1F1B", "utilization", "fullest device")
    names = {"1f1b": "1F1B, drains before an update", "periodic": "does not drain"}
    rows = [
        (
            names[kind],
            str(stages),
            seconds(one.update_s),
            f"{times['1f1b'][stages].update_s / one.update_s:.2f} x" if stages in times["1f1b"] else MISSING,
            f"{100 * one.utilization:.0f} %",
            f"{one.peak_bytes / 2**30:.1f} GiB",
        )
        for kind, of_kind in times.items()
        for stages, one in sorted(of_kind.items())
    ]
    note = "Simulated: an update of 32 samples of a GPT of 28 layers, 4,096 wide, on A100 of cluster=dgx_a100_80."
    return [Section("The pipelines", columns, tuple(rows), (note,))] if rows else []


def with_tables(page: str, found: Sequence[Section]) -> str:
    """A page whose tables, between two marks, are these."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    tables = report.markdown("", "", found).partition("## ")[2]
    return f"{before}{BEGIN}\n\n## {tables.rstrip()}\n\n{END}{after}"
