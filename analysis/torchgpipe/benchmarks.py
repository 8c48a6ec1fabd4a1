"""torchgpipe's benchmarks that are in its public documentation and not in the paper: AmoebaNet-D's memory, ResNet-101.

Each has a sweep, whose points are its rows, those of the paper's scale simulated and those of scale=local measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from analysis import run_artifacts
from analysis.cells import Cell, billions, compared
from analysis.paper_data import counted, texts
from analysis.report import MISSING, Section
from analysis.torchgpipe import basis
from analysis.torchgpipe.sweep_results import PUBLIC, SOURCE, Results, Source
from harness.core.memory_model import DTYPE_BYTES, named
from harness.core.record import RunRecord
from harness.report import comparison

GIB = 2**30
Records = dict[str, RunRecord]
"""By row."""


@dataclass(frozen=True)
class Figure:
    """A line of each row: `metric` of the published file, ours of a record and the first row's, and how it is written.

    `first` says whether the first row has it, which it has not if it is the unit.
    """

    name: str
    metric: str
    of: Callable[[RunRecord, RunRecord | None], float | None]
    form: Callable[[float], str]
    first: bool = True


@dataclass(frozen=True)
class Benchmark:
    """A table of the documentation; `rows` has what it calls each row, `others` those that no point has.

    `titles` are that of our table and the name of its cells. Published schemes are `prefix` and the row; GPipe's, which
    the documentation quotes, `gpipe` and the row.
    """

    sweep: str
    file: str
    titles: tuple[str, str]
    rows: tuple[str, ...]
    figures: tuple[Figure, ...]
    notes: tuple[str, ...]
    prefix: str = ""
    gpipe: str = ""
    gpipe_unit: str = ""
    others: tuple[str, ...] = ()

    def records(self, results: Results, source: Source) -> Records:
        """The records by row, also of runs that failed."""
        scale = next(one for one, of in SOURCE.items() if of == source)
        if scale not in PUBLIC[self.sweep]:
            return {}
        points = results.rows(self.sweep, scale=scale)
        return {row: one.record for row, one in zip(self.rows, points, strict=True) if one.record}


def _throughput(record: RunRecord, first: RunRecord | None) -> float | None:
    found: float | None = record.metrics.get("throughput")
    return found


def _speed_up(record: RunRecord, first: RunRecord | None) -> float | None:
    own, base = record.metrics.get("throughput"), first and first.metrics.get("throughput")
    return own / base if own and base else None


def _parameters(record: RunRecord, first: RunRecord | None) -> float | None:
    return run_artifacts.optional(run_artifacts.parameters, record)


def _model_bytes(record: RunRecord) -> float | None:
    """Bytes of weights, gradients and the optimizer's state."""
    config, count = record.config, run_artifacts.optional(run_artifacts.parameters, record)
    held = named(config["memory"], config["optimizer"]["name"], config["optimizer"]["momentum"])
    size = DTYPE_BYTES[config["precision"]["dtype"]] * (held.weights + held.gradients + held.optimizer)
    return None if count is None else count * size


def _model(record: RunRecord, first: RunRecord | None) -> float | None:
    held = _model_bytes(record)
    return None if held is None else held / GIB


def _activations(record: RunRecord, first: RunRecord | None) -> float | None:
    """Peaks of all devices less `_model_bytes`, as the benchmark has it."""
    peaks, held = record.metrics.get("peak_memory_bytes"), _model_bytes(record)
    return (sum(peaks) - held) / GIB if peaks and held is not None else None


def _gib(figure: float) -> str:
    return f"{figure:.2f} GiB" if figure >= 0.5 else f"{figure * 1024:.1f} MiB"


SPEED = Figure("throughput, samples/s", "throughput", _throughput, "{:.3f} /s".format)
SPEED_UP = Figure("speed-up", "speedup", _speed_up, "{:.3f}".format, first=False)
PARAMETERS = Figure("parameters, 1e9", "parameters", _parameters, "{:,.0f}".format)
MODEL = Figure("model memory, GiB", "model_memory", _model, _gib)
ACTIVATIONS = Figure("peak activation memory, GiB", "peak_activation_memory", _activations, _gib)
ERROR = Figure("top-1 error, %", "top1_error", lambda record, first: None, "{:.2f} %".format)
PIPELINES = ("baseline", "pipeline-1", "pipeline-2", "pipeline-4", "pipeline-8")
BENCHMARKS = (
    Benchmark(
        "amoebanet_memory",
        "torchgpipe_extra_public_amoebanetd_memory",
        ("Public documentation: memory of AmoebaNet-D (L, D), batch 128", "Public, AmoebaNet-D memory"),
        PIPELINES,
        (PARAMETERS, MODEL, ACTIVATIONS),
        (
            "Model memory is 12 bytes a parameter: weight, gradient, and RMSprop's state, for which sgd's momentum "
            "stands here. Activation memory is all else: of what the caching allocator reserves in the documentation, "
            "of live bytes here. The first row did not fit on a P40.",
        ),
        prefix="torchgpipe ",
        gpipe="GPipe (Huang et al.) ",
        gpipe_unit="peak activation memory in GB",
    ),
    Benchmark(
        "resnet101_speed",
        "torchgpipe_extra_public_resnet101_speed",
        ("Public documentation: speed of ResNet-101", "Public, ResNet-101 speed"),
        PIPELINES,
        (SPEED, SPEED_UP),
        (
            "Calibrated: the P40's efficiency for convolutions and for elementwise kernels, on the first row and on "
            "Naive-1 of Table 4; all other figures are predictions.",
            "In small the devices share these cores: no speed-up is to be expected there.",
        ),
        prefix="torchgpipe ",
        gpipe="GPipe v4 Fig. 3(b) ",
        gpipe_unit="speed-up",
    ),
    Benchmark(
        "resnet101_accuracy",
        "torchgpipe_extra_public_resnet101_accuracy",
        ("Public documentation: accuracy of ResNet-101 on ImageNet", "Public, ResNet-101 accuracy"),
        ("pipeline-256", "pipeline-1k", "pipeline-4k"),
        (ERROR, SPEED),
        (
            "The error is published only: a simulation has none, and to train on ImageNet is far beyond this machine. "
            "That a pipeline trains as one device does is exact in small: claim TG-15.",
            "The published speed includes ImageNet's images from disk, with torchgpipe 0.0.3; ours has them in memory. "
            "nn.DataParallel, which copies the weights in each step, is no engine here.",
        ),
        others=("dataparallel-256", "dataparallel-1k", "reference-256 (Goyal et al.)", "reference-8k (Goyal et al.)"),
    ),
)


@dataclass(frozen=True)
class Line:
    """A figure of a row: as it is `printed`, as a number, and ours; None is "not known"."""

    figure: Figure
    printed: str
    published: float | None
    simulated: float | None
    measured: float | None


def sections(results: Results) -> list[Section]:
    """The tables of which something was run."""
    return [
        _section(results, one) for one in BENCHMARKS if any(one.records(results, source) for source in SOURCE.values())
    ]


def cells(results: Results) -> Iterator[Cell]:
    """The figures that can be simulated."""
    for one in BENCHMARKS:
        lines = {row: _lines(results, one, row) for row in one.rows}
        for number, figure in enumerate(one.figures):
            own = {row: of_row[number] for row, of_row in lines.items() if figure.first or row != one.rows[0]}
            pairs = {row: (line.published, line.simulated) for row, line in own.items()}
            if figure is PARAMETERS:
                pairs = {row: (billions(published), billions(ours)) for row, (published, ours) in pairs.items()}
            if figure is not ERROR:
                yield from compared(one.titles[1], figure.name, pairs)


def _lines(results: Results, one: Benchmark, row: str) -> list[Line]:
    """A line for each figure of a row."""
    ran = [_well(one.records(results, source)) for source in SOURCE.values()]
    found = []
    for figure in one.figures:
        scheme = one.prefix + row
        printed = next(iter(texts(one.file, figure.metric, scheme=scheme)), "")
        published = counted(one.file, figure.metric, scheme=scheme) if printed[:1].isdigit() else None
        ours = [figure.of(of[row], of.get(one.rows[0])) if row in of else None for of in ran]
        found.append(Line(figure, printed, published, *ours))
    return found


def _section(results: Results, one: Benchmark) -> Section:
    columns: tuple[str, ...] = ("row", "", "published", "simulated", "simulated / published")
    columns += ("measured in small",) if "local" in PUBLIC[one.sweep] else ()
    rows = []
    for row in (*one.rows, *one.others):
        known = [line for line in _lines(results, one, row) if line.printed or line.simulated or line.measured]
        for number, line in enumerate(known):
            rows.append(("" if number else row, *_texts(line))[: len(columns)])
    return Section(one.titles[0], columns, tuple(rows), (*_basis(results, one), *one.notes, *_gpipe(one)), texts=2)


def _texts(line: Line) -> tuple[str, ...]:
    """The cells of a line after its row; what is printed as a word is shown as it is."""
    form = line.figure.form
    published, simulated, measured = (
        MISSING if one is None else form(one) for one in (line.published, line.simulated, line.measured)
    )
    ratio = f"{line.simulated / line.published:.2f}" if line.simulated and line.published else MISSING
    word = line.printed if line.printed and line.published is None else published
    return line.figure.name.partition(",")[0], word, simulated, ratio, measured


def _well(records: Records) -> Records:
    return {row: record for row, record in records.items() if record.status == "ok"}


def _basis(results: Results, one: Benchmark) -> Iterator[str]:
    """What the figures rest on, and what is missing."""
    simulated, measured = (one.records(results, source) for source in SOURCE.values())
    yield from dict.fromkeys(basis.simulation(record) for record in _well(simulated).values())
    if small := _well(measured).values():
        channels, sizes = (basis.listed(small, "model", key) for key in ("channels", "size"))
        yield f"{basis.measurement(small)}: networks with {channels} channels at first, {sizes} pixels a side."
        if SPEED in one.figures and (busy := comparison.busy_machine(list(small))):
            yield f"In small {busy}."
    for source, records in zip(SOURCE.values(), (simulated, measured), strict=True):
        yield from (f"{row}, {source}: {basis.failure(bad)}" for row, bad in records.items() if bad.status != "ok")
        if PARAMETERS in one.figures:
            yield from run_artifacts.missing_files(_well(records).values(), run_artifacts.parameters)


def _gpipe(one: Benchmark) -> Iterator[str]:
    """The figures of GPipe on TPUs that the documentation quotes."""
    for quoted in (figure for figure in one.figures[-1:] if one.gpipe):
        own = {row: next(iter(texts(one.file, quoted.metric, scheme=one.gpipe + row)), MISSING) for row in one.rows}
        listed = ", ".join(f"{row}: {printed}" for row, printed in own.items())
        yield f"GPipe on TPU, as the documentation quotes it, {one.gpipe_unit}: {listed}."
