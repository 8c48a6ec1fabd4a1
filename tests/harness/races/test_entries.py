"""What command lines and files of schemes mean, and which races are refused."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

import run
from harness.config import registry
from harness.core.problem import CannotRun
from harness.races import entries, race
from harness.sweep import points

MLP = ["mode=race", "model=mlp", "cluster.device=cpu", "cluster.devices=2", "tracker=none"]


def entered(*overrides: str) -> dict[str, dict[str, str]]:
    """The keys of each entry."""
    return {one.name: one.row.point.values() for one in entries.entered([*MLP, *overrides])}


def refused(*overrides: str) -> str:
    with pytest.raises(CannotRun) as caught:
        entries.entered([*MLP, *overrides])
    return " ".join(str(caught.value).split())


def test_a_entry_for_each_engine_with_keys_of_its_own() -> None:
    found = entered("engine=single,gpipe,ddp", "batch.size=32", "gpipe:engine.checkpoint=never")
    assert [*found] == ["single", "gpipe", "ddp"]
    assert found["gpipe"]["engine.checkpoint"] == "never" and "engine.checkpoint" not in found["ddp"]
    assert all(keys["batch.size"] == "32" and keys["mode"] == "run" for keys in found.values())


@pytest.mark.usefixtures("computation")
def test_all_engines_begin_with_one_device() -> None:
    found = entered("engine=all")
    assert next(iter(found)) == "single" and {"gpipe", "myelin", "sbp", "ddp", "fsdp", "deepspeed"} <= {*found}
    assert found["sbp"]["planner"] == "autoddl", "it runs no plan of the default planner"


def test_micro_batches_have_the_size_of_the_first_ones() -> None:
    found = entered("engine=gpipe,ddp", "batch.size=32", "gpipe:batch.micro_batches=4")
    assert found["ddp"]["batch.micro_batch_size"] == "8"
    found = entered("engine=gpipe,ddp", "batch.size=32", "gpipe:batch.micro_batches=4", "ddp:batch.micro_batches=1")
    assert "batch.micro_batch_size" not in found["ddp"]
    assert "batch.micro_batch_size" not in entered("engine=gpipe,ddp", "batch.size=32", "batch.micro_batches=4")["ddp"]


def test_a_file_of_schemes(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text("schemes:\n  a b: [engine=gpipe, engine.checkpoint=always]\n  c: [engine=gpipe]\n")
    found = entered(f"schemes={path}", "a b:engine.checkpoint=never")
    assert [*found] == ["a b", "c"] and found["a b"]["engine.checkpoint"] == "never"


@pytest.mark.usefixtures("computation")
def test_a_sweep_with_schemes_is_a_race_for_each_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sweeps" / "mine.yaml"
    path.parent.mkdir()
    path.write_text("""
        schemes: {a: [engine=single], b: [engine=gpipe]}
        points: [[batch.size=16], [batch.size=32]]
        grid: {steps: 3, model: mlp}
    """)
    monkeypatch.setattr(registry, "ROOT", tmp_path)
    typed = [*MLP, "+sweeps=mine", "tracker=none"]
    found = [*entries.races(typed, several=True).values()]
    assert [entries.rounds(own) for own in found] == [3, 3]
    assert [[one.name for one in entries.entered(own)] for own in found] == [["a", "b"]] * 2
    assert [entries.entered(own)[0].row.point.values()["batch.size"] for own in found] == ["16", "32"]
    other = entries.races([*typed, "engine=ddp,gpipe", "steps=5"], several=True)
    assert [entries.rounds(own) for own in other.values()] == [5, 5], "the command line's count"
    assert [one.name for one in entries.entered(next(iter(other.values())))] == ["ddp", "gpipe"]
    assert run._is_sweep_of_races(Namespace(multirun=True, overrides=["+sweeps=mine"]))
    assert not run._is_sweep_of_races(Namespace(multirun=True, overrides=["+sweeps=mine", "mode=plan"]))
    with pytest.raises(CannotRun, match=r"has schemes: its points are races   -> python run\.py -m \+sweeps=mine"):
        points.expand(["+sweeps=mine"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("schemes: 3", "must hold schemes: {name: [overrides], ...}"),
        ("other: {a: []}", "must hold schemes: {name: [overrides], ...}"),
        ("schemes: {a: [engine=gpipe], b: [engine=gpipe]}", "is the same run as a"),
        ("schemes: {a: [engine=gpipe]}", "is no race: it takes two"),
        ("schemes: {a: [engine=gpipe, steps=3], b: [engine=ddp]}", "a:steps=3 is a key of the whole race"),
    ],
)
def test_files_that_are_no_race(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    assert said in refused(f"schemes={path}")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "engine is no race: it takes two"),
        (("engine=gpipe",), "is no race: it takes two"),
        (("engine=gpipe,gpip",), "engine gpip is not one of"),
        (("engine=single,gpipe", "gpip:steps=3"), "is for gpip, which is not one of single, gpipe -> steps=3"),
        (("engine=single,gpipe", "gpipe:batch.size=32"), "differs between single and gpipe"),
        (("engine=single,gpipe", "gpipe:batch.size=32"), "batch.size 32 differs"),
        (("engine=single,gpipe", "gpipe:steps=3"), "gpipe:steps=3 is a key of the whole race, not of one entry"),
        (("engine=single,gpipe", "gpipe:out=x", "gpipe:mode=plan"), "gpipe:mode=plan is a key of the whole race"),
        (("engine=single,gpipe", "gpipe:race.minutes=1"), "gpipe:race.minutes=1 is a key of the whole race"),
        (("engine=single,gpipe", "gpipe:engine=ddp"), "gives the entry another engine than its name says"),
        (("engine=single,gpipe", "gpipe:seed=1"), "differs between single and gpipe"),
        (("engine=single,gpipe", "schemes=/nowhere"), "is given next to schemes="),
        (("schemes=/nowhere",), "is not a file"),
        (("engine=single,gpipe,",), "engine '' is not one of"),
        (("engine=single,gpipe", "race.minutes=0"), "race.minutes 0 must be above 0"),
        (("engine=single,gpipe", "model.widht=3"), "model.widht is not a key"),
        (("engine=single,gpipe", "cluster=summit"), "is only described, runs need cluster=local"),
        (("engine=single,ddp", "ddp:mesh.data=3"), "this race cannot run:"),
    ],
)
def test_what_is_no_race_is_refused_before_anything_runs(overrides: tuple[str, ...], said: str) -> None:
    found = refused(*overrides)
    assert found.startswith("this race cannot run:") and said in found


@pytest.mark.parametrize("wrong", ["gpipe:mesh.pipeline", "out=[x", "mesh.pipeline=]"])
def test_what_cannot_be_read_is_a_problem(wrong: str) -> None:
    with pytest.raises(CannotRun, match="cannot be read"):
        race.main([*MLP, "engine=single,gpipe", wrong], several=False)


def test_other_keys_have_several_values_with_m_alone() -> None:
    keys = [*MLP, "engine=single,ddp", "batch.size=8,16", "out=x", "ddp:mesh.data=2"]
    with pytest.raises(CannotRun, match="has several values, a race has one"):
        entries.races(keys, several=False)
    found = entries.races(keys, several=True)
    assert len(found) == 2 and all(len(name) == 10 for name in found)
    assert [*entries.races([*MLP, "engine=single,ddp"], several=False)] == [""]


@pytest.mark.parametrize(("steps", "rounds"), [((), None), (("steps=3",), 3)])
def test_steps_are_rounds(steps: tuple[str, ...], rounds: int | None) -> None:
    assert entries.rounds([*MLP, "ddp:mesh.data=2", *steps]) == rounds


@pytest.mark.parametrize("steps", ["0", "-1", "x", "1001"])
def test_wrong_rounds(steps: str) -> None:
    with pytest.raises(CannotRun, match="is the number of rounds, from 1 to 1000"):
        entries.rounds([f"steps={steps}"])
