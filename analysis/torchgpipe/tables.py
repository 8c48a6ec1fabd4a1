"""The report: a section for each table, one for the search, one for the claims."""

from __future__ import annotations

from collections.abc import Iterator

from analysis import changed_checks, claim_check, run_artifacts
from analysis.report import MISSING, Section
from analysis.torchgpipe import basis, benchmarks, table3
from analysis.torchgpipe.claim_checks import verdicts
from analysis.torchgpipe.quantities import (
    GIB,
    PARAMETERS,
    QUANTITIES,
    SPEED,
    SPEED_UP,
    gpipe,
    p40_gib,
    paper,
    small_speed_up,
    small_throughput,
)
from analysis.torchgpipe.sweep_results import PIPELINES, ROWS, SCALES, SMALL, SOURCE, Results, Source
from harness.core.record import RunRecord

TITLES = {
    1: "Table 1: what each component adds, U-Net (5, 64) in four stages",
    2: "Table 2: speed of AmoebaNet-D (18, 256)",
    3: "Table 3: memory of U-Net, batch 32",
    4: "Table 4: speed of U-Net (5, 64)",
}
LIVE = (
    "Memory: what the caching allocator reserves; simulated are the peaks of its pools for each stream, without unused "
    "parts of blocks and workspaces. Live memory: the bytes in use at the fullest moment; the paper has none."
)
REMARKS = {
    1: f"{LIVE} Utilization: the paper shows what nvidia-smi does, we show busy compute time / step time.",
    2: "Predictions: nothing was calibrated on this network. "
    "The work is counted, layer by layer, from the network. GPipe's speed-ups are for TPUs, quoted in the paper.",
    3: LIVE,
    4: "Calibrated: the P40's efficiency for convolutions and for elementwise kernels, on Naive-1's throughput and on "
    "that of ResNet-101 on one P40 (benchmarks/resnet101-speed): all other figures of these tables are predictions.",
}
COLUMNS = ("row", "", "paper", "simulated", "simulated / paper", "measured in small")


def sections(results: Results) -> list[Section]:
    """The tables of which something was run; the last ones are those of the claims."""
    said = verdicts(results)
    found = [_table(results, table) for table in ROWS if results.has_rows(table)]
    small = [_small(results)] if results.was_run("table2", "local") else []
    search = [_search(results)] if any(candidate.record for candidate in results.search()) else []
    found += [*small, *search, *benchmarks.sections(results)]
    return [*found, claim_check.section(said), *changed_checks.sections("torchgpipe", said)]


def _table(results: Results, table: int) -> Section:
    notes = [*_basis(results, table), REMARKS[table], *_failed(results, table), *_missing_profiles(results, table)]
    if table == 2:
        notes.append("GPipe on TPU: " + ", ".join(f"{row}: {gpipe(row):g}" for row in ROWS[2]))
    columns = COLUMNS if "local" in SCALES[table] else COLUMNS[:-1]
    rows = tuple(row[: len(columns)] for row in _rows(results, table))
    return Section(TITLES[table], columns, rows, tuple(notes), texts=2)


def _rows(results: Results, table: int) -> Iterator[tuple[str, ...]]:
    """A line for each row and quantity."""
    for row in ROWS[table]:
        for number, quantity in enumerate(QUANTITIES[table]):
            published = paper(table, row, quantity.name)
            ours = quantity.of(results, table, row, "simulated")
            ratio = f"{ours / published:.2f}" if ours and published else MISSING
            cells = (published, ours, quantity.of(results, table, row, "measured"))
            texts = [MISSING if cell is None else quantity.text(cell) for cell in cells]
            yield "" if number else row, quantity.name, texts[0], texts[1], ratio, texts[2]


def _basis(results: Results, table: int) -> Iterator[str]:
    """Yield the basis of a table's simulated and measured figures, and the simulated rows that a P40 would not hold."""
    simulated, measured = (_well(results, table, source) for source in ("simulated", "measured"))
    yield from dict.fromkeys(basis.simulation(record) for record in simulated.values())
    if measured:
        channels, sizes = (basis.listed(measured.values(), "model", key) for key in ("channels", "size"))
        nets = f"U-Nets with {channels} channels at first, {sizes} pixels a side"
        precision = basis.listed(measured.values(), "precision", "dtype")
        yield f"{basis.measurement(measured.values())}: {nets}, in {precision}."
        if table == 4:
            yield "In small the devices share these cores: no speed-up is to be expected there."
    for row, record in simulated.items():
        fullest = max(record.metrics.get("peak_memory_bytes") or [0]) / GIB
        if fullest > p40_gib():
            yield f"{row} takes {fullest:.1f} GiB on its fullest device, the paper's cards have {p40_gib():g}."


def _well(results: Results, table: int, source: Source) -> dict[str, RunRecord]:
    """The rows whose run ended well."""
    records = {row: results.record(table, row, source) for row in ROWS[table]}
    return {row: record for row, record in records.items() if record and record.status == "ok"}


def _failed(results: Results, table: int) -> Iterator[str]:
    """Rows whose run did not end well, with the reason."""
    for scale in SCALES[table]:
        for row in ROWS[table]:
            record = results.record(table, row, SOURCE[scale])
            if record and record.status != "ok":
                yield f"{row}, {SOURCE[scale]}: {basis.failure(record)}"


def _missing_profiles(results: Results, table: int) -> list[str]:
    """Rows without a profile, from which parameters are counted."""
    if PARAMETERS not in QUANTITIES[table]:
        return []
    records = (record for scale in SCALES[table] for record in _well(results, table, SOURCE[scale]).values())
    return run_artifacts.missing_files(records, run_artifacts.parameters)


def _small(results: Results) -> Section:
    """Table 2 in small, with rows of its own."""
    records = {row: record for row in SMALL if (record := results.small(row))}
    rows = []
    for row in SMALL:
        figures = ((SPEED, small_throughput(results, row)), (SPEED_UP, small_speed_up(results, row)))
        rows.append((row, *(MISSING if one is None else quantity.text(one) for quantity, one in figures)))
    well = [record for record in records.values() if record.status == "ok"]
    notes = []
    if well:
        depth, channels, size = (basis.listed(well, "model", key) for key in ("layers", "channels", "size"))
        samples = basis.listed(well, "batch", "size")
        net = f"AmoebaNet-D ({depth}, {channels}), {size} pixels a side, {samples} samples a step"
        notes.append(f"{basis.measurement(well)}: {net}, in {basis.listed(well, 'precision', 'dtype')}.")
    notes.append(
        "n=1 is a pipeline of one stage: it recomputes as the others do. Each device computes with one thread."
    )
    notes += [f"{row}: {basis.failure(record)}" for row, record in records.items() if record.status != "ok"]
    title = "Table 2 in small: speed of an AmoebaNet-D in one and two stages"
    return Section(title, ("row", SPEED.name, SPEED_UP.name), tuple(rows), tuple(notes))


def _search(results: Results) -> Section:
    """Every candidate, and the largest that fits for each number of devices, with the paper's."""
    rows = [
        (
            one.row,
            f"({one.convs}, {one.channels})",
            table3.billions(table3.unet_parameters(one.convs, one.channels)),
            table3.outcome(one),
        )
        for one in results.search()
    ]
    notes = []
    for row in PIPELINES:
        largest_row, published = table3.largest(results, row), paper(3, row, "parameters")
        ours = str(largest_row) if largest_row else "not known"
        notes.append(
            f"{row}: the largest candidate that fits is {ours}; the paper's has {table3.billions(int(published or 0))}."
        )
    title = "Table 3, search: the largest U-Net (B, C) that fits, stages by planner.by=memory"
    return Section(title, ("row", "(B, C)", "parameters", "outcome"), tuple(rows), tuple(notes), texts=4)
