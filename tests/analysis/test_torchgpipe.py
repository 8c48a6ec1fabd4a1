"""The report on torchgpipe's tables: which record is which row, and what becomes of each claim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis import command
from analysis.published import claims
from analysis.torchgpipe import figures, rows, search, tables
from analysis.torchgpipe.figures import GIB, QUANTITIES, paper
from analysis.torchgpipe.page import PAGE
from analysis.torchgpipe.rows import PIPELINES, ROWS, SCALES, SMALL, SOURCE, Results, configs
from analysis.torchgpipe.verdicts import RESERVED, TESTS, verdicts
from harness.record import RunRecord
from harness.registry import ROOT


def record(config: dict[str, Any], **metrics: Any) -> RunRecord:
    source: Any = "measured" if config["mode"] == "run" else "simulated"
    return RunRecord("x", "ok", source, config=config, metrics=metrics)


def published() -> list[RunRecord]:
    """The paper's own numbers, as if they were simulated; the search finds the paper's models."""
    found = []
    for table, names in ROWS.items():
        own = configs(table, "paper")
        for name, config in zip(names, own, strict=False):
            told = {quantity.name: paper(table, name, quantity.name) for quantity in QUANTITIES[table]}
            metrics = {
                "throughput": told.get("throughput"),
                "utilization": [told["utilization"] / 100] if told.get("utilization") else None,
                "peak_memory_bytes": [told["memory"] * GIB / 2] * 2 if told.get("memory") else None,
                "parameters": int(told.get("parameters") or 0),
            }
            if table == 1:
                elements = 6_082_560 if name == "dep-str-ptl" else 11_980_800
                metrics["bytes_sent"] = {"activations": 128 * 4 * 1_511_424, "skips": 128 * 4 * (elements - 1_511_424)}
            found.append(record(config, **metrics))
        if table == 3:
            for config in own[len(names) :]:
                fits = (config["mesh"]["pipeline"], config["model"]["convs"], config["model"]["channels"]) in (
                    (None, 6, 72), (1, 11, 128), (2, 24, 128), (4, 24, 160), (8, 48, 160)
                )  # fmt: skip
                found.append(record(config) if fits else RunRecord("x", "infeasible", "simulated", config=config))
    return found


def said(records: list[RunRecord]) -> dict[str, str]:
    return {verdict.id: verdict.says for verdict in verdicts(Results(records))}


def test_each_point_of_a_sweep_is_a_row_of_its_own() -> None:
    for table, scales in SCALES.items():
        for scale in scales:
            own = configs(table, scale)
            assert len(own) == len(set(rows.points(table, scale))), "no two points are the same row"
            assert len(own) == len(ROWS[table]) or (table, scale) == (3, "paper")
            results = Results([record(config, throughput=number) for number, config in enumerate(own)])
            got = [results.metric(table, row, SOURCE[scale], "throughput") for row in ROWS[table]]
            assert got == list(range(len(ROWS[table])))


def small(factors: dict[str, float]) -> list[RunRecord]:
    """The rows of Table 2 in small, with throughputs of 100 times the factors."""
    found = dict(zip(SMALL, configs(2, "local"), strict=True))
    return [record(found[row], throughput=100 * factor) for row, factor in factors.items()]


def test_the_rows_in_small_are_those_of_their_names() -> None:
    assert len(set(rows.points(2, "local"))) == len(SMALL) == 6
    for row, config in zip(SMALL, configs(2, "local"), strict=True):
        stages, micro_batches = len(config["planner"]["balance"]), config["batch"]["micro_batches"]
        assert row == f"n={stages} m={micro_batches}"
        assert sum(config["planner"]["balance"]) == config["model"]["layers"] + 6
        assert config["engine"]["checkpoint"] == ("always" if micro_batches == 1 else "except_last")
        assert config["model"]["name"] == "amoebanet" and config["mode"] == "run"
    assert len({config["batch"]["size"] for config in configs(2, "local")}) == 1


def test_table_2_in_small() -> None:
    records = small({"n=1 m=1": 1.1, "n=2 m=1": 1.0, "n=2 m=4": 1.6, "n=2 m=8": 1.7})
    machine = {"machine": {"cpu": "EPYC", "cores_allowed": 2}}
    failed = RunRecord("x", "oom", "measured", "rank 0 was\nkilled", config=configs(2, "local")[1])
    results = Results([*(replace(one, manifest=machine) for one in records), failed])
    section = tables.sections(results)[0]
    assert (section.title.partition(":")[0], section.columns) == ("Table 2 in small", ("row", "throughput", "speed-up"))
    assert section.rows == (
        ("n=1 m=1", "110.000 /s", "1.100"), ("n=1 m=4", "-", "-"), ("n=1 m=8", "-", "-"),
        ("n=2 m=1", "100.000 /s", "1.000"), ("n=2 m=4", "160.000 /s", "1.600"), ("n=2 m=8", "170.000 /s", "1.700"),
    )  # fmt: skip
    assert section.notes[0] == (
        "Measured on EPYC with 2 cores: AmoebaNet-D (3, 32), 96 pixels a side, 64 samples a step, in float32."
    )
    assert section.notes[-1] == "n=1 m=4: oom: rank 0 was killed"
    (claim,) = [one for one in verdicts(Results([*published(), *records])) if one.id == "TG-7"]
    assert claim.says == "holds" and claim.simulated.endswith("m=32: 1.77, 2.71, 4.95")
    assert claim.measured == "in small n=2: 1.00, 1.60, 1.70"


def test_local_rows_have_the_paper_s_structure() -> None:
    """The same stages, components and checkpointing, so that schedules and copies are the same."""
    for table in (1, 3, 4):
        for ours, local in zip(configs(table, "paper"), configs(table, "local"), strict=False):
            assert ours["engine"] == local["engine"]
            assert ours["planner"] == local["planner"]
            assert ours["model"]["convs"] == local["model"]["convs"]
            assert table == 3 or ours["batch"]["micro_batches"] == local["batch"]["micro_batches"]


def test_rows_carry_the_published_settings() -> None:
    for table, names in ROWS.items():
        for name, config in zip(names, configs(table, "paper"), strict=False):
            assert table != 2 or [config["model"][key] for key in ("name", "layers", "channels", "size")] == [
                "amoebanet", 18, 256, 224
            ]  # fmt: skip
            for number in figures._numbers(table):
                own = f"n={number.devices} m={number.micro_batches}" if table == 2 else number.scheme
                if own != name or number.scheme.startswith("GPipe"):
                    continue
                if number.metric == "balance":
                    assert config["planner"]["balance"] == [int(layers) for layers in number.value.split()]
                if number.metric == "batch_size":
                    assert config["batch"]["size"] == int(number.value)
                if number.metric == "micro_batches":
                    assert config["batch"]["micro_batches"] == int(number.value)
                if number.metric == "checkpoint":
                    assert config["engine"]["checkpoint"] == number.value


def test_other_keys_make_no_other_row_and_the_latest_counts() -> None:
    (config, *_) = configs(1, "paper")
    later = config | {"seed": 7, "out": "elsewhere", "tracker": {"name": "wandb"}}
    results = Results([record(config, throughput=1.0), record(later, throughput=2.0)])
    assert results.metric(1, "baseline", "simulated", "throughput") == 2.0
    other = config | {"batch": {"size": 64, "micro_batches": 8}}
    assert Results([record(other, throughput=1.0)]).record(1, "baseline", "simulated") is None


def test_every_published_figure_is_found() -> None:
    for table, names in ROWS.items():
        for name in names:
            for quantity in QUANTITIES[table]:
                assert paper(table, name, quantity.name) is not None, (table, name, quantity.name)
    assert paper(1, "dep-str-ptl", "throughput") == 58.477
    assert paper(2, "n=8 m=32", "speed-up") == 4.95
    assert figures.gpipe("n=8 m=32") == 3.48
    assert paper(4, "Pipeline-8", "speed-up") == 3.105


def test_parameters_are_those_that_are_published() -> None:
    sizes = ((6, 72), (11, 128), (24, 128), (24, 160), (48, 160))
    for row, (convs, channels) in zip(PIPELINES, sizes, strict=True):
        assert figures.unet_parameters(convs, channels) == paper(3, row, "parameters")
    assert figures.unet_parameters(5, 64) == 232_687_328
    assert figures.unet_parameters(1, 2) == 9 * (6 + 8 + 32 + 128 + 512 + 1024 + 4 + 16 + 64 + 256 + 1024) + 1


def test_without_records_nothing_is_claimed() -> None:
    told = said([])
    assert list(told) == [claim.id for claim in claims("torchgpipe")] == [f"TG-{n}" for n in range(1, 16)]
    by_tests = {"TG-13", "TG-14", "TG-15"}
    assert {id: says for id, says in told.items() if says != "not run"} == dict.fromkeys(
        sorted(by_tests, key=len), "by tests"
    )


def test_the_paper_s_own_numbers_keep_its_claims() -> None:
    told = said(published())
    assert told == {f"TG-{n}": "by tests" if n > 12 else "holds" for n in range(1, 16)}


def slower(factor: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda metrics: metrics | {"throughput": metrics["throughput"] * factor}


def fuller(factor: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda metrics: metrics | {"peak_memory_bytes": [factor * size for size in metrics["peak_memory_bytes"]]}


@pytest.mark.parametrize(
    ("table", "row", "change", "broken"),
    [
        (1, "dep-str-ptl", slower(0.96), {"TG-1"}),
        (1, "dep-str-ptl", slower(0.75), {"TG-1", "TG-2"}),
        (1, "dep-str-ptl", lambda m: m | {"utilization": [0.7]}, {"TG-3"}),
        (1, "dep-x-x", fuller(1.3), {"TG-4"}),
        (1, "dep-str-x", lambda m: m | {"bytes_sent": {"activations": 0, "skips": 1}}, {"TG-5"}),
        (2, "n=8 m=1", slower(1.2), {"TG-6"}),
        (2, "n=4 m=32", slower(0.6), {"TG-7", "TG-8"}),
        (2, "n=8 m=32", slower(0.7), {"TG-8"}),
        (2, "n=8 m=32", slower(1.4), {"TG-8"}),
        (3, "Pipeline-1", fuller(1.2), {"TG-10"}),
        (3, "Pipeline-4", lambda m: m | {"parameters": m["parameters"] + 1}, {"TG-9"}),
        (3, "Pipeline-1", fuller(0.8), {"TG-10"}),
        (4, "Pipeline-1", slower(0.9), {"TG-11"}),
        (4, "Pipeline-1", slower(1.1), {"TG-11"}),
        (4, "Pipeline-4", slower(0.5), {"TG-12"}),
        (4, "Pipeline-8", slower(2.6), {"TG-12"}),
    ],
)
def test_a_claim_that_does_not_hold_is_told(
    table: int, row: str, change: Callable[[dict[str, Any]], dict[str, Any]], broken: set[str]
) -> None:
    key = rows.points(table, "paper")[ROWS[table].index(row)]
    records = [
        record(one.config, **change(one.metrics)) if rows.decisive(one.config) == key else one for one in published()
    ]
    assert {id for id, says in said(records).items() if says == "does not hold"} == broken


def test_the_largest_that_fits_must_grow() -> None:
    """Pipeline-8 holds no more than Pipeline-4; a candidate that was not run leaves the question open."""
    key = {rows.decisive(config): config for config in configs(3, "paper")[5:]}
    eight = [one for one, config in key.items() if config["mesh"]["pipeline"] == 8]
    none = [RunRecord("x", "infeasible", "simulated", config=one.config) if rows.decisive(one.config) in eight else one
            for one in published()]  # fmt: skip
    assert said(none)["TG-9"] == "does not hold"
    some = [one for one in published() if rows.decisive(one.config) not in eight[1:]]
    assert search.largest(Results(some), "Pipeline-8") is None
    assert said(some)["TG-9"] == "not run"
    many = [one for one, config in key.items() if config["mesh"]["pipeline"] == 4 and config["model"]["convs"] == 48]
    four = [record(one.config) if rows.decisive(one.config) in many else one for one in some]
    four += [RunRecord("x", "infeasible", "simulated", config=key[one]) for one in eight[1:]]
    assert said(four)["TG-9"] == "does not hold"  # as large a model on 4 devices as on 8
    two = [one for one, config in key.items() if config["mesh"]["pipeline"] == 2 and config["model"]["channels"] == 128]
    fewer = [record(one.config) if rows.decisive(one.config) in two else one for one in published()]
    assert str(search.largest(Results(fewer), "Pipeline-2")) == "(26, 128) 5.42B"
    assert said(fewer)["TG-9"] == "holds"


def test_candidates_say_by_how_much_they_do_not_fit() -> None:
    reason = "cannot run:\n  stage 0   needs 23.0 GiB of 22.0 GiB   -> x\n  stage 1   needs 24.5 GiB of 22.0 GiB"
    config = configs(3, "paper")[6]
    (found,) = [one for one in Results([RunRecord("x", "infeasible", "simulated", reason, config=config)]).search()
                if one.record]  # fmt: skip
    assert (found.row, found.convs, found.channels) == ("Naive-1", 6, 80)
    assert search.outcome(found) == "does not fit: 24.5 GiB of 22.0 GiB"


@pytest.mark.parametrize("test", sorted({test for tests in TESTS.values() for test in tests}))
def test_the_tests_that_settle_a_claim_exist(test: str) -> None:
    path, name = test.split("::")
    assert f"def {name}(" in (ROOT / path).read_text()


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, one in enumerate([*published(), *small(dict.fromkeys(SMALL, 1.0))]):
        one.save(tmp_path / "runs" / str(number) / "record.json")
    page_of = replace(PAGE, path=tmp_path / "page.md", figures={})
    assert command.main(page_of, [str(tmp_path / "runs"), "--write"]) == 0
    printed = capsys.readouterr().out
    page = (tmp_path / "page.md").read_text()
    assert "| Pipeline-4 | throughput | 67.042 /s | 67.042 /s | 1.00 | - |" in page
    assert "| n=8 m=32 | throughput | 132.413 /s | 132.413 /s | 1.00 |\n" in page, "nothing is measured at this scale"
    assert "| n=2 m=8 | 100.000 /s | 1.000 |" in page
    assert (
        "| TG-2 | holds | all components together are nearly twice as fast as the baseline | 1.907 | 1.907 | - |"
        in page
    )
    assert "Pipeline-8: the largest candidate that fits is (48, 160) 15.82B; the paper's has 15.82B." in printed
    assert "left out" not in printed + page
    assert command.main(page_of, [str(tmp_path / "runs" / "0")]) == 0, "all but one row are missing"
    printed = capsys.readouterr().out
    sweep = "python run.py -m +sweeps=torchgpipe_table"
    lines = [f"    {sweep}{table}" for table in ("2", "3", "4", "2 scale=local")]
    assert printed.endswith("\n".join(["\n\nNot run yet, and left out:", "", *lines, ""]))
    assert [line for line in printed.splitlines() if line.startswith(("Table", "Claims"))] == [
        tables.TITLES[1], "Claims"
    ]  # fmt: skip
    assert command.main(page_of, [str(tmp_path / "nowhere")]) == 2
    assert "nowhere   is not there" in capsys.readouterr().err


def test_a_row_that_failed_is_named() -> None:
    failed = RunRecord("x", "oom", "measured", "rank 0 was\nkilled", config=configs(4, "local")[2])
    section = tables.sections(Results([failed]))[0]
    assert "Pipeline-2, measured: oom: rank 0 was killed" in section.notes
    assert section.rows[4] == ("Pipeline-2", "throughput", "35.502 /s", "-", "-", "-")


def test_only_what_was_run_has_a_table() -> None:
    def titles(records: list[RunRecord]) -> list[str]:
        return [section.title.partition(":")[0] for section in tables.sections(Results(records))]

    assert titles([]) == ["Claims"]
    failed, candidate = RunRecord("x", "oom", "measured", config=configs(3, "local")[0]), record(configs(3, "paper")[5])
    assert titles([failed]) == ["Table 3", "Claims"]
    assert titles(small({"n=2 m=4": 1.0})) == ["Table 2 in small", "Claims"]
    assert titles([candidate]) == ["Table 3, search", "Claims"]
    assert titles([failed, candidate]) == ["Table 3", "Table 3, search", "Claims"]
    for records in ([failed], [candidate]):
        assert "torchgpipe_table3" in tables.missing(Results(records)), "one of the two is left out"
    assert "torchgpipe_table3" not in tables.missing(Results([failed, candidate]))


def test_where_devices_share_cores_no_speed_up_is_to_be_expected() -> None:
    local = replace(record(configs(4, "local")[2], throughput=1.0), manifest={"machine": {"cores_allowed": 2}})
    told = "In small the devices share these cores: no speed-up is to be expected there."
    assert tables.sections(Results([local]))[0].notes[1] == told
    assert told not in tables.sections(Results([record(configs(4, "paper")[2])]))[0].notes, "nothing is measured"


def test_the_notes_say_what_figures_rest_on() -> None:
    simulated, local = configs(1, "paper")[0], configs(1, "local")[0]
    basis = {"simulation": {"cluster": {"name": "p40x8 (effective)"}, "layer_times": "analytic on Tesla P40"}}
    records = [
        replace(record(simulated, peak_memory_bytes=[GIB, round(22.6 * GIB)]), manifest=basis),
        replace(record(local, throughput=1.0), manifest={"machine": {"cpu": "EPYC", "cores_allowed": 2}}),
    ]
    section = tables.sections(Results(records))[0]
    assert section.notes[:3] == (
        "Simulated on p40x8 (effective); layer times analytic on Tesla P40.",
        "Measured on EPYC with 2 cores: U-Nets with 8 channels at first, 64 pixels a side, in float32.",
        "baseline takes 22.6 GiB on its fullest device, the paper's cards have 22.",
    )


def test_a_claim_that_does_not_hold_has_its_reason() -> None:
    key = rows.points(3, "paper")[1]
    less = {"peak_memory_bytes": [GIB]}
    changed = [record(one.config, **(one.metrics | less)) if rows.decisive(one.config) == key else one
               for one in published()]  # fmt: skip
    assert not any(note.startswith("TG-10") for note in tables.sections(Results(published()))[-1].notes)
    assert f"TG-10: {RESERVED}" in tables.sections(Results(changed))[-1].notes
