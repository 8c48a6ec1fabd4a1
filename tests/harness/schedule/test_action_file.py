"""Schedule files against torch.distributed.pipelining: what it writes is read, what is written it loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from harness.core.problem import ProblemError
from harness.report import schedule_files
from harness.schedule import action_check, action_file, plan_order
from harness.schedule.builders.interleaved import interleaved
from harness.schedule.builders.zero_bubble import zbv
from harness.schedule.transfers import Transfer
from harness.schedule.validate import validation_errors

MULTI = {
    "ScheduleLoopedBFS": (1, 2, 3),
    "ScheduleInterleaved1F1B": (1, 2, 3),
    "ScheduleInterleavedZeroBubble": (1, 2, 3),
    "ScheduleZBVZeroBubble": (2,),
    "ScheduleDualPipeV": (2,),
}
"""Classes of several stages on a rank, and how many of them."""
SINGLE = ("ScheduleGPipe", "Schedule1F1B")
FORMATS = ("compute_only", "compute_comms")


def stages(ranks: int, chunks: int, rank: int = 0) -> list[Any]:
    return [
        SimpleNamespace(
            stage_index=rank + chunk * ranks,
            num_stages=ranks * chunks,
            group_size=ranks,
            group_rank=rank,
            submod=nn.Identity(),
        )
        for chunk in range(chunks)
    ]


def made(name: str, ranks: int, chunks: int, micro_batches: int) -> Any | None:
    """A schedule of torch, None where it does not take such numbers."""
    from torch.distributed.pipelining import schedules

    try:
        return getattr(schedules, name)(stages(ranks, chunks), micro_batches, loss_fn=lambda *_: None)
    except (ValueError, AssertionError):
        return None


def cases() -> Iterator[tuple[str, int, int, int]]:
    for name, chunks in MULTI.items():
        for ranks in (2, 4, 8):
            for chunk in chunks:
                for micro_batches in (4, 5, 6, 8, 16, 32):
                    yield name, ranks, chunk, micro_batches


@pytest.mark.parametrize(("name", "ranks", "chunks", "micro_batches"), list(cases()))
def test_what_torch_writes_is_read_and_written_again(
    name: str, ranks: int, chunks: int, micro_batches: int, tmp_path: Path
) -> None:
    """Byte for byte, as CSV and through JSON; without messages it is the same as with them."""
    schedule = made(name, ranks, chunks, micro_batches)
    if schedule is None:
        return
    found = {}
    for form in FORMATS:
        path = tmp_path / f"{form}.csv"
        schedule._dump_csv(str(path), format=form)
        theirs = path.read_bytes().decode()
        actions = found[form] = action_file.read(path)
        assert action_file.text(actions, "x.csv") == theirs
        action_file.write(actions, tmp_path / "again.json")
        assert action_file.read(tmp_path / "again.json") == actions
        assert action_check.problems(actions, path.name, ranks, micro_batches) == []
    assert found["compute_comms"].tasks() == found["compute_only"].tasks()
    assert found["compute_only"].micro_batches == micro_batches
    assert len(found["compute_only"].placement) == ranks * chunks


@pytest.mark.parametrize(("name", "ranks", "chunks", "micro_batches"), list(cases()))
def test_torch_loads_what_is_written(name: str, ranks: int, chunks: int, micro_batches: int, tmp_path: Path) -> None:
    from torch.distributed.pipelining import schedules

    schedule = made(name, ranks, chunks, micro_batches)
    if schedule is None:
        return
    schedule._dump_csv(str(tmp_path / "torch.csv"), format="compute_only")
    actions = action_file.read(tmp_path / "torch.csv")
    action_file.write(actions, tmp_path / "ours.csv")
    runtime = schedules._PipelineScheduleRuntime(stages(ranks, chunks), micro_batches, loss_fn=lambda *_: None)
    runtime._load_csv(str(tmp_path / "ours.csv"))
    assert runtime.pipeline_order == schedule.pipeline_order
    assert runtime.pipeline_order_with_comms == schedule.pipeline_order_with_comms


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("micro_batches", [8, 16, 32])
def test_single_stage_classes_by_their_lists_of_actions(name: str, ranks: int, micro_batches: int) -> None:
    """torch's own list of 1F1B for its last rank begins with micro-batch 1 (2.13): only its notation is compared."""
    schedule = made_single(name, ranks, micro_batches)
    rows = [[("" if one is None else str(one)) for one in row] for row in schedule._get_pipeline_order().values()]
    actions = action_file.parse("\r\n".join(",".join(row) for row in rows) + "\r\n", "x.csv")
    assert [["" if cell is None else str(cell) for cell in row] for row in actions.rows] == rows
    if name == "ScheduleGPipe":
        assert action_check.problems(actions, "x.csv", ranks, micro_batches) == []


def made_single(name: str, ranks: int, micro_batches: int) -> Any:
    from torch.distributed.pipelining import schedules

    stage = SimpleNamespace(num_stages=ranks, group_size=ranks, group_rank=0, stage_index=0, has_backward=True)
    return getattr(schedules, name)(stage, micro_batches, loss_fn=lambda *_: None)


def transfers(count: int) -> list[Transfer]:
    return [Transfer(j, j + 1) for j in range(count - 1)]


@pytest.mark.parametrize("schedule", [zbv(6, 3, transfers(6)), interleaved(4, 2, 2, transfers(4))], ids=["zbv", "i"])
def test_a_schedule_survives_as_a_file(schedule: Any) -> None:
    actions = action_file.from_schedule(schedule)
    again = action_file.to_schedule(
        action_file.parse(action_file.text(actions, "x.csv"), "x.csv"), transfers(len(schedule.devices))
    )
    assert again == schedule
    assert validation_errors(again) == []


def refused(content: str, name: str = "own.csv", **known: int) -> str:
    try:
        found = action_check.problems(action_file.parse(content, name), name, **known)
    except ProblemError as error:
        found = list(error.problems)
    assert all(one.key == "engine.schedule" and one.value == name for one in found)
    return " | ".join(one.message for one in found)


GOOD = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(
    "content",
    [
        GOOD,
        "\ufeff0F0,0B0\n"[1:],
        "0F0, 0B0 \n\n\n",
        "0F0,0R0,0B0\n",
        "0F0,0I0,0W0\n",
        "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
        "0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD\n",
        "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n",
    ],
)
def test_files_by_hand(content: str) -> None:
    assert refused(content) == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no actions"),
        ("\n , \n", "has no actions"),
        ("0F0,0X0\n1F0", "row 1, column 2: '0X0' is no action"),
        ("0F,0B0", "row 1, column 1: '0F' names no micro-batch"),
        ("0F0,0UNSHARD3", "row 1, column 2: '0UNSHARD3' has a micro-batch"),
        ("0F0,0B999999999999999999999", "row 1, column 2: '0B999999999999999999999' has a number above 100,000"),
        ("(0F0;0UNSHARD)OVERLAP_F_B", "row 1, column 1: '(0F0;0UNSHARD)OVERLAP_F_B' is no pair of a forward"),
        ("(0F0;1F0)OVERLAP_F_B,1B0,0B0", "row 1, column 1: '(0F0;1F0)OVERLAP_F_B' is no pair of a forward"),
        ("(0B0;0F0)OVERLAP_F_B", "row 1, column 1: '(0B0;0F0)OVERLAP_F_B' is no pair of a forward"),
        ("0F0,0B0,1UNSHARD", "has no pass of stage 1, but 1UNSHARD (row 1, column 3)"),
        ("0F0,0B0\n\n1F0,1B0", "row 2: has no pass"),
        (",\n0F0,0B0", "row 1: has no pass"),
        ("0F0,0B0\n1UNSHARD", "row 2: has no pass"),
        ('0F0,"0B0' + "," * 140_000, "line 1 is no CSV: field larger than field limit"),
        ("(0F0;)OVERLAP_F_B", "row 1, column 1: '' is no action"),
        ("0F0,0B0,0F0", "row 1, column 3: 0F0 stands at row 1, column 1, too"),
        ("0F0,0B0,1F0\n1B0", "row 2, column 1: 1B0 is of stage 1, which runs in row 1 (1F0, row 1, column 3)"),
        ("0F0,0B0\n2F0,2B0", "has no pass of stage 1, but 2B0 (row 2, column 2)"),
        ("0F0,0F1,0B0", "row 1, column 2: has 0F1, but neither 0B1 nor 0I1"),
        ("0F0,0B0,0B1", "row 1, column 3: 0B1 has no 0F1, nor has any stage"),
        ("0F0,0B0,0B1\n1F0,1F1,1B1,1B0", "row 1, column 3: has no 0F1"),
        ("0F0,0I0,0W0\n1F0,1I0,1W7", "row 2, column 3: 1W7 has no 1F7, nor has any stage"),
        ("0F0,0I0", "row 1, column 2: has 0I0, but no 0W0"),
        ("0F0,0W0", "row 1, column 2: has 0W0, but no 0I0"),
        ("0F0,0I0,0W0,0B0", "row 1, column 4: has 0B0 and 0I0: a backward pass is whole, or comes in halves"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0", "row 2: has neither 1F1 nor 1B1"),
        ("0F0,0B0,0B1\n1B0,1F0,1F1", "row 2, column 1: 1B0 comes before 1F0 (row 2, column 2)"),
        ("0B0,0F0", "row 1, column 1: 0B0 comes before 0F0 (row 1, column 2)"),
        ("0F0,0W0,0I0", "row 1, column 2: 0W0 comes before 0I0 (row 1, column 3)"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0", "0SEND_F0 has no 1RECV_F0"),
        ("0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0", "1B0 has no 1SEND_B0"),
        ("0UNSHARD", "has no pass"),
    ],
)
def test_bad_files_are_refused_with_the_place(content: str, message: str) -> None:
    assert message in refused(content)


def test_all_that_is_wrong_is_found_at_once(tmp_path: Path) -> None:
    """Cells that are no action hide nothing of the others; what they may have meant is not guessed."""
    own = tmp_path / "own.csv"
    own.write_text("0F0,0X0,0B0,0F0\n1B0,1F0,0B1,zero\n")
    found = [one.message for one in plan_order.refused(str(own), pipeline=3)]
    assert found == [
        "row 1, column 2: '0X0' is no action",
        "row 2, column 4: 'zero' is no action",
        "has 2 rows, the pipeline has 3 devices",
        "row 1, column 4: 0F0 stands at row 1, column 1, too",
        "row 2, column 3: 0B1 is of stage 0, which runs in row 1 (0F0, row 1, column 1)",
        "row 2, column 1: 1B0 comes before 1F0 (row 2, column 2)",
    ]
    with pytest.raises(ProblemError) as drawn:
        schedule_files.read(str(own))
    assert [one.message for one in drawn.value.problems] == [text for text in found if "devices" not in text]
    own.write_text("0B0,0F0,0F1\n1F0,1B0,1F1\n")
    found = [one.message for one in plan_order.refused(str(own))]
    assert found == [
        "row 1, column 3: has 0F1, but neither 0B1 nor 0I1",
        "row 2, column 3: has 1F1, but neither 1B1 nor 1I1",
        "row 1, column 1: 0B0 comes before 0F0 (row 1, column 2)",
    ]


@pytest.mark.parametrize("between", [";", "\t", " ", " | "])
def test_other_characters_between_actions(between: str) -> None:
    """As spreadsheets write, where the comma is in numbers."""
    with pytest.raises(ProblemError, match="-> a comma between two actions"):
        action_file.parse(between.join(("0F0", "0F1", "", "0B0", "0B1")), "own.csv")
    with pytest.raises(ProblemError, match="-> an action such as"):
        action_file.parse(between.join(("0F0", "zero")), "own.csv")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", 'is not {"ranks": [["0F0", ...], ...]}'),
        ('{"ranks": [["0F0", 3]]}', "a cell is neither a text nor null"),
        ('{"ranks": []}', "has no actions"),
        ("{", "is not JSON"),
        ('{"ranks": [["0F0", "zero"]]}', "row 1, column 2: 'zero' is no action"),
    ],
)
def test_bad_json_is_refused(content: str, message: str) -> None:
    assert message in refused(content, "own.json")


def test_another_number_of_ranks_or_micro_batches() -> None:
    assert refused(GOOD, ranks=3) == "has 2 rows, the pipeline has 3 devices"
    assert refused(GOOD, micro_batches=8) == "has 2 micro-batches, the run has 8"
    assert refused(GOOD, ranks=2, micro_batches=2) == ""


def test_a_cycle_names_its_actions_with_their_places() -> None:
    found = refused("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    assert found == (
        "never ends: 1B0 (row 2, column 3) waits for 1F1 (row 2, column 2), which waits for 0F1 (row 1, column 3), "
        "which waits for 0B0 (row 1, column 2), which waits for 1B0"
    )


def test_a_cycle_under_messages_that_block() -> None:
    """Rank 0 sends micro-batch 1 while rank 1 sends the gradient of micro-batch 0: neither receives."""
    actions = action_file.parse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", "own.csv")
    assert action_check.problems(actions, "own.csv") == []
    (found,) = action_check.problems(actions, "own.csv", blocking=True)
    assert found.message.startswith("never ends where messages block: ")
    assert "SEND_F1" in found.message and "SEND_B0" in found.message


def test_many_problems_are_shortened() -> None:
    content = ",".join(f"0F{i}" for i in range(50))
    try:
        found = action_check.problems(action_file.parse(content, "x.csv"), "x.csv")
    except ProblemError as error:
        found = list(error.problems)
    assert len(found) == action_file.SHOWN
    assert found[-1].message == "and 43 more problems of this kind"


def test_a_slip_in_a_number_is_found_at_once() -> None:
    """99,999 stages of so many micro-batches are missing: nobody counts them all."""
    assert "and at least 993 more problems of this kind" in refused("0F0,0B0,99999F99999,99999B99999")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    for name in ("none.csv", "binary.csv", ""):
        with pytest.raises(ProblemError, match="cannot be read"):
            action_file.read(tmp_path / name)
