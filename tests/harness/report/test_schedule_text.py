from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.op import Op
from harness.core.problem import ProblemError, apply
from harness.report.schedule_text import COMMAND, DRAWN, FURTHER, USAGE, drawing, grid, main
from harness.schedule import QueueOps, Schedule
from harness.schedule.builders.gpipe import gpipe
from harness.schedule.builders.one_f_one_b import one_f_one_b
from harness.schedule.transfers import Transfer
from harness.simulator import Deadlock
from tests.problems import Row, refused, row


def picture(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def test_gpipe_looks_like_the_papers_figure() -> None:
    """torchgpipe, Figure 2: all forwards, then all backwards; here a backward takes two slots."""
    assert grid(gpipe(3, range(3), [Transfer(0, 1), Transfer(1, 2)], "never")) == picture("""
        time      0   1   2   3   4   5   6   7   8   9   10  11  12  13  14
        device 0  0F0 0F1 0F2 .   .   .   .   .   .   0B2---- 0B1---- 0B0----
        device 1  .   1F0 1F1 1F2 .   .   .   1B2---- 1B1---- 1B0---- .   .
        device 2  .   .   2F0 2F1 2F2 2B2---- 2B1---- 2B0---- .   .   .   .
    """)


def test_1f1b_looks_like_the_picture_in_its_documentation() -> None:
    drawn = grid(one_f_one_b(4, range(3), [Transfer(0, 1), Transfer(1, 2)]))
    assert one_f_one_b.__doc__ is not None
    assert drawn in picture(one_f_one_b.__doc__)


def test_the_picture_in_the_documentation_of_grid() -> None:
    assert grid.__doc__ is not None
    assert grid(one_f_one_b(2, range(2), [Transfer(0, 1)])) in picture(grid.__doc__)


def test_a_recomputation_takes_a_slot_before_the_gradient_arrives() -> None:
    assert grid(gpipe(1, range(2), [Transfer(0, 1)], "always")) == picture("""
        time      0   1   2   3   4   5   6
        device 0  0F0 0R0 .   .   .   0B0----
        device 1  .   1F0 1R0 1B0---- .   .
    """)


def test_without_fork_and_join_the_last_stage_recomputes_all_first() -> None:
    assert grid(gpipe(2, [0], [], "always", dependency=False)) == picture("""
        time      0   1   2   3   4   5   6   7
        device 0  0F0 0F1 0R1 0R0 0B1---- 0B0----
    """)


def test_weight_gradients_take_half_of_the_backward_pass() -> None:
    ops = tuple(Op.parse(text) for text in ("0F10", "0B10", "0W10"))
    assert grid(Schedule((QueueOps(3, "compute", ops),), (3,))) == picture("""
        time      0    1    2
        device 3  0F10 0B10 0W10
    """)


def test_stages_of_one_device_share_its_row() -> None:
    assert grid(gpipe(1, [0, 1, 0], [Transfer(0, 1), Transfer(1, 2)], "never")) == picture("""
        time      0   1   2   3   4   5   6   7   8
        device 0  0F0 .   2F0 2B0---- .   .   0B0----
        device 1  .   1F0 .   .   .   1B0---- .   .
    """)


@given(st.integers(1, 12), st.integers(1, 12))
def test_every_task_is_drawn_once(m: int, n: int) -> None:
    schedule = one_f_one_b(m, range(n), [])
    lines = grid(schedule).splitlines()
    slots = lines[0].split()[1:]
    assert slots == [str(slot) for slot in range(3 * (m + n - 1))]
    assert sorted(cell.rstrip("-") for line in lines[1:] for cell in line.split()[2:] if cell != ".") == sorted(
        str(op) for op in schedule.ops() if op.kind != "step"
    )


def test_a_schedule_that_cannot_end_is_not_drawn() -> None:
    with pytest.raises(Deadlock, match="0B0"):
        grid(Schedule((QueueOps(0, "compute", (Op(0, "B", 0), Op(0, "F", 0))),), (0,)))
    assert grid(Schedule((), ())) == ""


@pytest.mark.parametrize("name", DRAWN)
def test_every_schedule_is_drawn_with_its_defaults(name: str) -> None:
    assert drawing([name]).startswith("time ")


def test_the_keys_of_the_command_line() -> None:
    drawn = drawing(["gpipe", "stages=1", "micro_batches=2", "recompute=always", "dependency=false"])
    assert drawn.partition("\n\n")[0] == grid(gpipe(2, [0], [], "always", dependency=False))
    assert drawing(["single", "micro_batches=1"]).splitlines()[1] == "device 0  0F0 0B0----"
    assert drawing(["interleaved", "stages=6", "chunks=3", "micro_batches=2"]).count("device ") == 2
    assert drawing(["message_driven", "stages=2", "micro_batches=2", "rule=alternate", "limit=1"]).count("0B1") == 1


def test_what_blocks_a_device_and_is_not_drawn_stands_below() -> None:
    assert drawing(["data_parallel", "micro_batches=1", "kind=zero1"]).splitlines()[5:] == [
        "device 0 compute  0F0 0B0 0collective:reduce_scatter@data 0step 0collective:all_gather@data"
    ]
    assert drawing(["deepspeed", "stages=2", "micro_batches=1"]).endswith("1recv0<0 1F0 1B0 1send0<0 1step")
    assert "step" not in drawing(["zbv"]) + drawing(["fill_drain"]) + drawing(["myelin"])
    lines = drawing(["myelin", "stages=1", "micro_batches=1", "replicas=2", "offload=true"]).splitlines()
    assert [line.split()[-1] for line in lines[-4:]] == [
        "0step:chunk0/bucket0b", "0copy:chunk0/bucket0b/in", "0copy:chunk0/bucket0b/out",
        "0collective:all_reduce@data/chunk0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("pipe", ("pipe", None, [])),
        ("zbv stages=5", ("stages", 5, ["stages=4", "stages=6"])),
        ("zbv recompute=always", ("recompute=always", None, [])),
        ("data_parallel kind=zero4", ("kind", "zero4", ["kind=all_reduce"])),
        ("single stages=2", ("stages=2", None, [])),
        ("gpipe stages", ("stages", None, [])),
        ("gpipe stages=0", ("stages", "0", ["stages=4"])),
        ("gpipe micro_batches=2.5", ("micro_batches", "2.5", ["micro_batches=4"])),
        ("gpipe recompute=often", ("recompute", "often", ["recompute=never"])),
        ("myelin offload=1", ("offload", "1", ["offload=true"])),
        ("myelin order=2f2b", ("order", "2f2b", ["order=message_driven"])),
        ("gpipe dependency=1", ("dependency", "1", ["dependency=true"])),
        ("interleaved stages=5", ("stages", 5, ["stages=4", "stages=6 micro_batches=6"])),
        ("interleaved stages=1", ("stages", 1, ["stages=2"])),
        ("interleaved micro_batches=3", ("micro_batches", 3, ["micro_batches=2"])),
        ("interleaved micro_batches=1", ("micro_batches", 1, ["micro_batches=2"])),
        ("message_driven rule=in_order", ("rule", "in_order", ["rule=fifo"])),
    ],
)
def test_a_bad_command_line_is_answered_with_what_is_wrong(arguments: str, found: Row) -> None:
    name, *typed = arguments.split()
    with pytest.raises(ProblemError) as caught:
        drawing([name, *typed])
    (problem,) = refused(caught)
    assert row(problem) == found
    for fix in problem.fixes:
        assert drawing([name, *apply(typed, fix)])


def test_every_schedule_has_the_same_default_for_recomputation() -> None:
    for name in {*DRAWN} - {*FURTHER, "myelin"}:  # which have no such key, or recompute inside the backward pass
        assert drawing([name]) == drawing([name, "recompute=never"])
        assert "R0" not in drawing([name])
        assert "R0" in drawing([name, "recompute=except_last"])


@pytest.mark.parametrize("typed", ["single stages=4 micro_batches=2", "gpipe x stages=2", "pipe stages=2"])
def test_a_fix_works_when_typed(typed: str) -> None:
    with pytest.raises(ProblemError) as caught:
        drawing(typed.split())
    (fix,) = (problem.hint for problem in refused(caught))
    assert fix.startswith(f"{COMMAND} ")
    assert drawing(fix.removeprefix(COMMAND).split()).startswith("time ")
    assert ("micro_batches=2" in fix) == ("micro_batches=2" in typed), "what was right is kept"


def test_the_usage_has_an_example_that_works_for_each_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = [line.split() for line in USAGE.splitlines() if line.startswith(f"    {COMMAND}")]
    assert {example[3] for example in examples} == {*DRAWN, "own.csv"}
    (tmp_path / "own.csv").write_text("0F0,0B0\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for example in examples:
        assert drawing(example[3:]).startswith("time ")
    for name in DRAWN:
        assert f"\n{name} " in USAGE


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0), (["gpipe", "-h"], 0)])
def test_help(
    arguments: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", *arguments])
    assert main() == code
    printed = capsys.readouterr()
    assert (printed.err if code else printed.out) == f"{USAGE}\n"


def test_the_command() -> None:
    """Free of torch, and exit code 2 where the command line is wrong."""
    code = "import sys; from harness.report.schedule_text import main; code = main(); assert 'torch' not in sys.modules"
    good = subprocess.run([sys.executable, "-c", code, "single", "micro_batches=1"], capture_output=True, text=True)
    assert (good.returncode, good.stdout.splitlines()[1]) == (0, "device 0  0F0 0B0----")
    bad = subprocess.run([sys.executable, "-m", "harness.schedule", "gpipe", "x=1"], capture_output=True, text=True)
    assert bad.returncode == 2
    assert "x=1   is not KEY=VALUE of gpipe" in bad.stderr
    assert "python -m harness.schedule --help" in bad.stderr
