"""The type of every problem: its text, its fixes as overrides, and which of several fixes counts."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from harness.core.problem import (
    LEAVE_OUT,
    CannotRun,
    Fix,
    NoPlan,
    Problem,
    after_fixes,
    apply,
    deduplicate,
    leaving_out,
    note,
    refuse,
    spelled,
    table,
    typed,
)

PROBLEMS = [
    Problem(
        "mesh.pipeline", 16, "needs 16 devices, the cluster has 8", ({"mesh.pipeline": 8}, {"cluster.devices": 16})
    ),
    Problem("batch.micro_batches", 7, "does not divide batch.size 512", ({"batch.micro_batches": 8},), "another model"),
    Problem("cluster.memory_gb", 22.0, "stage 3 needs 27.1 GiB of 22.0 GiB"),
    Problem("data.file", "", "does not exist", ({"data.file": None},)),
    Problem("squeue", None, "has no answer within 30 s", hint="scontrol ping"),
]
EXPECTED = """\
engine=gpipe model=unet cannot run:
  mesh.pipeline 16        needs 16 devices, the cluster has 8   -> mesh.pipeline=8, or cluster.devices=16
  batch.micro_batches 7   does not divide batch.size 512        -> batch.micro_batches=8, or another model
  cluster.memory_gb 22    stage 3 needs 27.1 GiB of 22.0 GiB
  data.file ''            does not exist                        -> data.file=null
  squeue                  has no answer within 30 s             -> scontrol ping"""


def test_all_problems_are_in_one_aligned_table() -> None:
    assert table(PROBLEMS, "engine=gpipe model=unet") == EXPECTED


def test_cannot_run_says_the_table_and_keeps_the_problems() -> None:
    with pytest.raises(CannotRun) as caught:
        refuse(PROBLEMS, "engine=gpipe model=unet")
    assert (str(caught.value), caught.value.problems) == (EXPECTED, tuple(PROBLEMS))
    refuse([])


def test_a_note_is_one_line() -> None:
    expected = (
        "note: batch.micro_batches 7   does not divide batch.size 512   -> batch.micro_batches=8, or another model"
    )
    assert note(PROBLEMS[1]) == expected
    assert PROBLEMS[0].statement == "mesh.pipeline 16 needs 16 devices, the cluster has 8"


def test_fixes_that_take_long_are_found_when_the_problem_is_read() -> None:
    asked: list[str] = []

    def find() -> list[Fix]:
        asked.append("fixes")
        return [{"mesh.pipeline": 8}]

    stated = Problem("mesh.pipeline", 16, "is more than the 8 layers")
    error = NoPlan(stated, find)
    assert (error.unsolved, asked) == (stated, [])
    assert error.problem.fixes == ({"mesh.pipeline": 8},)
    assert str(error) == "mesh.pipeline 16   is more than the 8 layers   -> mesh.pipeline=8"
    assert asked == ["fixes"] and NoPlan(stated).problem == stated


def problem(message: str, *fixes: Fix, hint: str = "") -> Problem:
    return Problem("mesh.pipeline", 16, message, fixes, hint)


@pytest.mark.parametrize("numbers", [(8, 5), (5, 8)])
def test_of_two_fixes_of_a_key_the_smaller_one_stays(numbers: tuple[int, int]) -> None:
    large, small = (problem(f"only {number}", {"mesh.pipeline": number}) for number in numbers)
    other = problem("is odd", {"mesh.pipeline": LEAVE_OUT})
    kept = min(large, small, key=lambda one: one.fixes[0]["mesh.pipeline"])
    assert deduplicate([large, small, other, other]) == [kept, other]


def test_an_alternative_that_fixes_only_one_of_two_is_dropped() -> None:
    devices = problem("needs 16 devices", {"mesh.pipeline": 2}, {"cluster.devices": 16}, hint="sbatch")
    layers = problem("needs 16 layers", {"mesh.pipeline": 5})
    expected = [problem("needs 16 devices", {"mesh.pipeline": 2})]
    assert deduplicate([devices, layers]) == deduplicate([layers, devices]) == expected
    assert deduplicate([devices, devices]) == [devices]


def test_problems_without_numbers_to_compare_stay() -> None:
    others = [problem("a"), problem("b"), problem("c", {"planner": "balance"}), problem("d", {"planner": "uniform"})]
    assert deduplicate([*others, *others]) == others


@pytest.mark.parametrize(
    ("fixes", "value"),
    [([{"mesh.data": 2}], 2), ([{"mesh.data": 2}, {"cluster.devices": 7}], 2),
     ([{"mesh.pipeline": 1, "mesh.data": 3}], 3),
     ([{"mesh.data": 9}], 7), ([{"cluster.devices": 3}, {"mesh.data": 2}], 7), ([], 7)],
)  # fmt: skip
def test_what_a_key_will_be_after_the_first_fixes(fixes: list[Fix], value: int) -> None:
    assert after_fixes([problem("x", *fixes)], "mesh.data", 7) == value


def test_a_fix_replaces_what_was_typed() -> None:
    overrides = ["engine=deepspeed", "engine.zero=2", "mesh.pipeline=16", "++seed=1", "batch.size=8"]
    assert apply(overrides, {"mesh.pipeline": 2, "cluster.devices": 4}) == [
        "engine=deepspeed", "engine.zero=2", "++seed=1", "batch.size=8", "mesh.pipeline=2", "cluster.devices=4",
    ]  # fmt: skip
    assert apply(overrides, {"engine": "gpipe"})[:2] == ["mesh.pipeline=16", "++seed=1"], "with the keys of the engine"
    assert apply(overrides, {"seed": LEAVE_OUT, "mesh": LEAVE_OUT}) == overrides[:2] + overrides[4:]


def test_a_refusal_comes_from_a_rank_as_it_is() -> None:
    refused = CannotRun([problem("is odd", {"steps": 3})], "a run")
    refused.add_note("in rank 1")
    found = pickle.loads(pickle.dumps(refused))
    assert (type(found), found.problems, found.title, str(found)) == (
        CannotRun,
        refused.problems,
        "a run",
        str(refused),
    )
    assert found.__notes__ == ["in rank 1"]


def test_a_fix_says_which_typed_keys_it_takes_away() -> None:
    """Else the user is refused once more for those."""
    overrides = ["precision=fp16", "precision.dtype=float16", "+precision.autocast=null", "steps=3"]
    (found,) = leaving_out([problem("x", {"precision": "fp32"}, {"steps": 1})], overrides)
    assert list(map(typed, found.fixes)) == ["precision=fp32 without precision.dtype and precision.autocast", "steps=1"]
    both: Fix = {"precision": "fp32", "precision.dtype": "float32"}
    (found,) = leaving_out([problem("x", both)], overrides[:2])
    assert found.fixes == (both,)


def test_a_fix_as_the_user_types_it() -> None:
    assert typed({"engine.offload": True, "batch.size": 4, "planner.by": "memory"}) == (
        "engine.offload=true batch.size=4 planner.by=memory"
    )
    assert typed({"planner.balance": [3, 2], "data.file": None, "out": "a b"}) == (
        "planner.balance=[3,2] data.file=null out='a b'"
    )
    assert typed({"mesh.pipeline": LEAVE_OUT, "engine": "gpipe"}) == "engine=gpipe without mesh.pipeline"


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.lists(st.integers(), max_size=3),
    st.text(st.characters(blacklist_categories=("Cs", "Cc"))),
)  # fmt: skip


@given(VALUES)
def test_a_spelled_value_is_read_as_it_was(value: Any) -> None:
    read = OverridesParser.create().parse_override(f"key={spelled(value)}").value()
    assert read == value or (isinstance(value, str) and value.isdecimal() and read == int(value))
