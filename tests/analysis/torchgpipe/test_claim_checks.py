"""The report on torchgpipe's tables: which record is which row, and what becomes of each claim."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from analysis import paper_cli
from analysis.match_records import points_of
from analysis.paper_data import claims, numbers
from analysis.report import Section
from analysis.torchgpipe import quantities, table3, tables
from analysis.torchgpipe.claim_checks import CLAIMS, RESERVED, TESTS, verdicts
from analysis.torchgpipe.page import PAGE
from analysis.torchgpipe.quantities import GIB, LIVE_MEMORY, QUANTITIES, paper
from analysis.torchgpipe.sweep_results import PIPELINES, ROWS, SCALES, SMALL, SOURCE, Results
from harness.cli.compose import compose
from harness.config.registry import ROOT
from harness.core.problem import Problem
from harness.core.record import RunRecord


@functools.cache
def configs(table: int, scale: str) -> tuple[dict[str, Any], ...]:
    """The composed configuration of each point of a table's sweep, in order; `overrides` are the point's."""
    found = []
    for point in points_of(f"torchgpipe_table{table}", scale):
        config: Any = OmegaConf.to_container(compose(point.overrides), resolve=True)
        found.append(config | {"overrides": list(point.overrides)})
    return tuple(found)


def record(config: dict[str, Any], status: Any = "ok", reason: str = "", **metrics: Any) -> RunRecord:
    own = {key: value for key, value in config.items() if key != "overrides"}
    source: Any = "measured" if config["mode"] == "run" else "simulated"
    manifest = {"overrides": config["overrides"], "origin": "runs/x"}
    whole = dict.fromkeys(("peak_memory_bytes", "phases_s", "bubble_fraction")) | {"step_time_s": 1.0} | metrics
    whole |= {"predicted_over_measured": {"step_time_s": None}} if config["mode"] == "run" else {}
    whole["throughput"] = 1.0 if whole.get("throughput") is None else whole["throughput"]
    return RunRecord("x", status, source, reason, own, {"mesh": {"pipeline": 1}}, whole, manifest=manifest)


def at(one: RunRecord, table: int, row: str) -> bool:
    """Whether a record is of this row at the paper's scale."""
    return one.manifest["overrides"] == configs(table, "paper")[ROWS[table].index(row)]["overrides"]


def published() -> list[RunRecord]:
    """The paper's own numbers, as if they were simulated; the search finds the paper's models."""
    found = []
    for table, names in ROWS.items():
        own = configs(table, "paper")
        for name, config in zip(names, own, strict=False):
            shown: dict[str, Any] = {quantity.name: paper(table, name, quantity.name) for quantity in QUANTITIES[table]}
            metrics: dict[str, Any] = {
                "throughput": shown.get("throughput"),
                "utilization": [shown["utilization"] / 100] if shown.get("utilization") else None,
                "peaks": [{"reserved": shown["memory"] * GIB / 2}] * 2 if shown.get("memory") else [],
                "parameters": int(shown.get("parameters") or 0),
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
                found.append(record(config, "ok" if fits else "infeasible"))
    return found


def said(records: list[RunRecord]) -> dict[str, str]:
    return {verdict.id: verdict.says for verdict in verdicts(Results(records))}


@pytest.mark.usefixtures("computation")
def test_each_point_of_a_sweep_is_a_row_of_its_own() -> None:
    for table, scales in SCALES.items():
        for scale in scales:
            own = configs(table, scale)
            assert len(own) == len(ROWS[table]) or (table, scale) == (3, "paper")
            results = Results([record(config, throughput=number) for number, config in enumerate(own)])
            got = [results.metric(table, row, SOURCE[scale], "throughput") for row in ROWS[table]]
            assert got == list(range(len(ROWS[table])))


def small(factors: dict[str, float]) -> list[RunRecord]:
    """The rows of Table 2 in small, with throughputs of 100 times the factors."""
    found = dict(zip(SMALL, configs(2, "local"), strict=True))
    return [record(found[row], throughput=100 * factor) for row, factor in factors.items()]


def test_the_rows_in_small_are_those_of_their_names() -> None:
    for row, config in zip(SMALL, configs(2, "local"), strict=True):
        stages, micro_batches = len(config["planner"]["balance"]), config["batch"]["micro_batches"]
        assert row == f"n={stages} m={micro_batches}"
        assert sum(config["planner"]["balance"]) == config["model"]["layers"] + 6
        assert config["engine"]["checkpoint"] == ("always" if micro_batches == 1 else "except_last")
        assert config["model"]["name"] == "amoebanet" and config["mode"] == "run"
    assert len({config["batch"]["size"] for config in configs(2, "local")}) == 1


@pytest.mark.usefixtures("computation")
def test_table_2_in_small() -> None:
    records = small({"n=1 m=1": 1.1, "n=2 m=1": 1.0, "n=2 m=4": 1.6, "n=2 m=8": 1.7})
    machine = {"machine": {"cpu": "EPYC", "cores_allowed": 2}}
    failed = record(configs(2, "local")[1], "oom", "rank 0 was\nkilled")
    results = Results([*(replace(one, manifest=one.manifest | machine) for one in records), failed])
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


@pytest.mark.usefixtures("computation")
def test_local_rows_have_the_paper_s_structure() -> None:
    """The same stages, components and checkpointing, so that schedules and copies are the same."""
    for table in (1, 3, 4):
        for ours, local in zip(configs(table, "paper"), configs(table, "local"), strict=False):
            assert ours["engine"] == local["engine"]
            assert ours["planner"] == local["planner"]
            assert ours["model"]["convs"] == local["model"]["convs"]
            assert table == 3 or ours["batch"]["micro_batches"] == local["batch"]["micro_batches"]


@pytest.mark.usefixtures("computation")
def test_rows_carry_the_published_settings() -> None:
    for table, names in ROWS.items():
        for name, config in zip(names, configs(table, "paper"), strict=False):
            assert table != 2 or [config["model"][key] for key in ("name", "layers", "channels", "size")] == [
                "amoebanet", 18, 256, 224
            ]  # fmt: skip
            for number in numbers(quantities.FILES[table]):
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


def with_keys(config: dict[str, Any], *overrides: str) -> dict[str, Any]:
    """The point with other values, as a command line makes it."""
    keys = {text.partition("=")[0] for text in overrides}
    return config | {"overrides": [*(t for t in config["overrides"] if t.partition("=")[0] not in keys), *overrides]}


def test_the_tracker_makes_no_other_row_and_the_latest_counts() -> None:
    (config, *_) = configs(1, "paper")
    later = with_keys(config, "out=elsewhere", "tracker=wandb")
    results = Results([record(config, throughput=1.0), record(later, throughput=2.0)])
    assert results.metric(1, "baseline", "simulated", "throughput") == 2.0


@pytest.mark.parametrize("key", ["cluster=h200", "precision=fp16", "mode=plan", "costs=measured", "batch.size=64"])
def test_another_cluster_is_another_point(key: str) -> None:
    """`python run.py -m +sweeps=torchgpipe_table4 cluster=h200` leaves the rows of the P40 alone."""
    (config, *_) = configs(4, "paper")
    results = Results([record(config, throughput=28.5), record(with_keys(config, key), throughput=500.0)])
    assert results.metric(4, "Naive-1", "simulated", "throughput") == 28.5


def test_every_published_figure_is_found() -> None:
    for table, names in ROWS.items():
        for name in names:
            for quantity in QUANTITIES[table]:
                known = paper(table, name, quantity.name) is not None
                assert known == (quantity is not LIVE_MEMORY), (table, name, quantity.name)
    assert paper(1, "dep-str-ptl", "throughput") == 58.477
    assert paper(2, "n=8 m=32", "speed-up") == 4.95
    assert quantities.gpipe("n=8 m=32") == 3.48
    assert paper(4, "Pipeline-8", "speed-up") == 3.105


def test_parameters_are_those_that_are_published() -> None:
    sizes = ((6, 72), (11, 128), (24, 128), (24, 160), (48, 160))
    for row, (convs, channels) in zip(PIPELINES, sizes, strict=True):
        assert quantities.unet_parameters(convs, channels) == paper(3, row, "parameters")
    assert quantities.unet_parameters(5, 64) == 232_687_328
    assert quantities.unet_parameters(1, 2) == 9 * (6 + 8 + 32 + 128 + 512 + 1024 + 4 + 16 + 64 + 256 + 1024) + 1


def test_without_records_nothing_is_claimed() -> None:
    verdict_of = said([])
    assert list(verdict_of) == [claim.id for claim in claims("torchgpipe")] == [f"TG-{n}" for n in range(1, 16)]
    by_tests = {"TG-13", "TG-14", "TG-15"}
    assert {claim.id for claim in claims("torchgpipe")} == {*CLAIMS, *by_tests}
    assert {id: says for id, says in verdict_of.items() if says != "not run"} == dict.fromkeys(
        sorted(by_tests, key=len), "by tests"
    )


@pytest.mark.usefixtures("computation")
def test_the_paper_s_own_numbers_keep_its_claims() -> None:
    verdict_of = said(published())
    assert verdict_of == {f"TG-{n}": "by tests" if n > 12 else "holds" for n in range(1, 16)}


def slower(factor: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda metrics: metrics | {"throughput": metrics["throughput"] * factor}


def fuller(factor: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda metrics: metrics | {"peaks": [{"reserved": factor * one["reserved"]} for one in metrics["peaks"]]}


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
@pytest.mark.usefixtures("computation")
def test_a_claim_that_does_not_hold_is_reported(
    table: int, row: str, change: Callable[[dict[str, Any]], dict[str, Any]], broken: set[str]
) -> None:
    records = [replace(one, metrics=change(one.metrics)) if at(one, table, row) else one for one in published()]
    assert {id for id, says in said(records).items() if says == "does not hold"} == broken


def test_the_largest_that_fits_must_grow() -> None:
    """Pipeline-8 holds no more than Pipeline-4; a candidate that was not run leaves the question open."""

    def like(one: RunRecord, **keys: int) -> bool:
        """Whether it is a candidate on so many devices, with such a model."""
        found = one.config.get("mesh", {}) | one.config.get("model", {})
        return one.config["planner"].get("by") == "memory" and all(found[key] == value for key, value in keys.items())

    def ending(status: Any, records: list[RunRecord], **keys: int) -> list[RunRecord]:
        return [replace(one, status=status) if like(one, **keys) else one for one in records]

    none = ending("infeasible", published(), pipeline=8)
    assert said(none)["TG-9"] == "does not hold"
    some = [one for one in published() if not like(one, pipeline=8) or one.status == "ok"]
    assert table3.largest(Results(some), "Pipeline-8") is None
    assert said(some)["TG-9"] == "not run"
    four = ending("ok", published(), pipeline=4, convs=48)
    assert said(four)["TG-9"] == "does not hold"  # as large a model on 4 devices as on 8
    fewer = ending("ok", published(), pipeline=2, channels=128)
    assert str(table3.largest(Results(fewer), "Pipeline-2")) == "(26, 128) 5.42B"
    assert said(fewer)["TG-9"] == "holds"


def test_candidates_say_by_how_much_they_do_not_fit() -> None:
    numbers = {"needed_bytes": 24.5 * 2**30, "available_bytes": 22.0 * 2**30}
    problems = Problem("planner", "balance", "is slow"), Problem("cluster.memory_gb", None, "is full", numbers=numbers)
    infeasible = replace(record(configs(3, "paper")[6], "infeasible", "cannot run"), problems=problems)
    (found,) = [one for one in Results([infeasible]).search() if one.record]
    assert (found.row, found.convs, found.channels) == ("Naive-1", 6, 80)
    assert table3.outcome(found) == "does not fit: 24.5 GiB of 22.0 GiB"
    former = replace(infeasible, problems=())
    assert table3.outcome(replace(found, record=former)) == "infeasible: cannot run", "a record of before"


@pytest.mark.parametrize("test", sorted({test for tests in TESTS.values() for test in tests}))
def test_the_tests_that_prove_a_claim_exist(test: str) -> None:
    path, name = test.split("::")
    assert f"def {name}(" in (ROOT / path).read_text()


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, one in enumerate([*published(), *small(dict.fromkeys(SMALL, 1.0))]):
        one.save(tmp_path / "runs" / str(number) / "record.json")
    page_of = replace(PAGE, path=tmp_path / "page.md", figures={})
    assert paper_cli.main(page_of, [str(tmp_path / "runs"), "--write"]) == 0
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
    assert "# 4 of 4 points" in printed, "nothing is left out but what is measured, and the public benchmarks"
    assert not re.findall(r"torchgpipe_table\d scale=paper", printed)
    assert paper_cli.main(page_of, [str(tmp_path / "runs" / "0")]) == 0, "all but one row are missing"
    printed = capsys.readouterr().out
    left = ("1 scale=paper   # 3 of 4", "1 scale=local   # 4 of 4", "2 scale=paper   # 9 of 9",
            "2 scale=local   # 6 of 6", "3 scale=paper   # 24 of 24", "3 scale=local   # 5 of 5",
            "4 scale=paper   # 5 of 5", "4 scale=local   # 5 of 5")  # fmt: skip
    public = ("amoebanet_memory scale=paper   # 5 of 5", "amoebanet_memory scale=local   # 5 of 5",
              "resnet101_speed scale=paper   # 5 of 5", "resnet101_speed scale=local   # 5 of 5",
              "resnet101_accuracy scale=paper   # 3 of 3")  # fmt: skip
    sweeps = (*(f"table{one}" for one in left), *public)
    lines = [f"    python run.py -m +sweeps=torchgpipe_{one} points" for one in sweeps]
    assert printed.endswith("\n".join(["\n\nNot run yet, and left out:", "", *lines, ""]))
    assert [line for line in printed.splitlines() if line.startswith(("Table", "Claims"))] == [
        tables.TITLES[1], "Claims"
    ]  # fmt: skip
    assert paper_cli.main(page_of, [str(tmp_path / "missing")]) == 2
    assert "missing   does not exist" in capsys.readouterr().err
    assert paper_cli.main(page_of, ["x" * 300]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_row_that_failed_is_named() -> None:
    failed = record(configs(4, "local")[2], "oom", "rank 0 was\nkilled")
    section = tables.sections(Results([failed]))[0]
    assert "Pipeline-2, measured: oom: rank 0 was killed" in section.notes
    assert section.rows[4] == ("Pipeline-2", "throughput", "35.502 /s", "-", "-", "-")


def test_only_what_was_run_has_a_table() -> None:
    def titles(records: list[RunRecord]) -> list[str]:
        return [section.title.partition(":")[0] for section in tables.sections(Results(records))]

    assert titles([]) == ["Claims"]
    failed, candidate = record(configs(3, "local")[0], "oom"), record(configs(3, "paper")[5])
    assert titles([failed]) == ["Table 3", "Claims"]
    assert titles(small({"n=2 m=4": 1.0})) == ["Table 2 in small", "Claims"]
    assert titles([candidate]) == ["Table 3, search", "Claims"]
    assert titles([failed, candidate]) == ["Table 3", "Table 3, search", "Claims"]
    missing = Results([failed, candidate]).missing()
    assert "torchgpipe_table3 scale=paper   # 23 of 24 points\n" in missing
    assert "torchgpipe_table3 scale=local   # 5 of 5 points\n" in missing, "what has failed has no result"


def on(one: RunRecord, **manifest: Any) -> RunRecord:
    return replace(one, manifest=one.manifest | manifest)


def test_where_devices_share_cores_no_speed_up_is_to_be_expected() -> None:
    local = on(record(configs(4, "local")[2], throughput=1.0), machine={"cores_allowed": 2})
    shown = "In small the devices share these cores: no speed-up is to be expected there."
    assert tables.sections(Results([local]))[0].notes[1] == shown
    assert shown not in tables.sections(Results([record(configs(4, "paper")[2])]))[0].notes, "nothing is measured"


def test_the_notes_say_what_figures_rest_on() -> None:
    simulated, local = configs(1, "paper")[0], configs(1, "local")[0]
    basis = {"cluster": {"name": "p40x8 (effective)"}, "layer_times": "analytic on Tesla P40"}
    records = [
        on(record(simulated, peak_memory_bytes=[GIB, round(22.6 * GIB)]), simulation=basis),
        on(record(local, throughput=1.0), machine={"cpu": "EPYC", "cores_allowed": 2}),
    ]
    section = tables.sections(Results(records))[0]
    assert section.notes[:3] == (
        "Simulated on p40x8 (effective); layer times analytic on Tesla P40.",
        "Measured on EPYC with 2 cores: U-Nets with 8 channels at first, 64 pixels a side, in float32.",
        "baseline takes 22.6 GiB on its fullest device, the paper's cards have 22.",
    )


def test_a_claim_that_does_not_hold_has_its_reason() -> None:
    less = {"peaks": [{"reserved": GIB}]}
    changed = [replace(one, metrics=one.metrics | less) if at(one, 3, "Pipeline-1") else one for one in published()]
    assert not any(note.startswith("TG-10") for note in claims_of(published()).notes)
    assert f"TG-10: {RESERVED}" in claims_of(changed).notes


def claims_of(records: list[RunRecord]) -> Section:
    (found,) = (one for one in tables.sections(Results(records)) if one.title == "Claims")
    return found


def test_a_table_of_which_a_part_was_run_says_what_makes_the_rest() -> None:
    verdict_of = {one.id: one for one in verdicts(Results(published()[1:-1]))}
    (reason,) = {verdict_of[f"TG-{n}"].reason for n in range(1, 5)}
    assert verdict_of["TG-1"].says == "not run"
    assert reason == "1 of 4 points were not run: python run.py -m +sweeps=torchgpipe_table1 scale=paper"
    assert (
        verdict_of["TG-11"].reason
        == "1 of 5 points were not run: python run.py -m +sweeps=torchgpipe_table4 scale=paper"
    )
    unfit = [replace(one, status="infeasible") if at(one, 4, "Pipeline-2") else one for one in published()]
    (verdict_of_it,) = [one.reason for one in verdicts(Results(unfit)) if one.id == "TG-12"]
    assert verdict_of_it == "1 of 5 points do not fit: python run.py -m +sweeps=torchgpipe_table4 scale=paper"


def test_parameters_without_a_profile_are_an_empty_cell_and_counted() -> None:
    without = {key: value for key, value in published()[13].metrics.items() if key != "parameters"}
    records = [replace(one, metrics=without) if at(one, 3, "Naive-1") else one for one in published()]
    section = next(one for one in tables.sections(Results(records)) if one.title.startswith("Table 3:"))
    assert section.rows[0] == ("Naive-1", "parameters", "362,157,516", "-", "-", "-")
    assert section.rows[3][3] == "2,213,834,176"
    assert (
        section.notes[-1]
        == "Cells are empty for 1 unreadable file: runs/x/profile.json does not exist -> run it again."
    )
    (verdict,) = [one for one in verdicts(Results(records)) if one.id == "TG-9"]
    assert (verdict.says, verdict.reason) == ("not run", "1 of 5 figures are not in the records")
