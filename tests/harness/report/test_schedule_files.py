"""Schedules from and to files by `python -m harness.schedule`."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core.problem import ProblemError
from harness.core.trace import Trace
from harness.report import schedule_files
from harness.report.schedule_text import drawing
from harness.schedule import action_file
from harness.schedule.builders.fill_drain import fill_drain
from harness.schedule.builders.one_f_one_b import one_f_one_b
from harness.schedule.builders.zero_bubble import zbv
from harness.schedule.transfers import Transfer
from tests.problems import refused

OWN = "0F0,0F1,,0I0,0W0,0B1\n1F0,1B0,1F1,1B1\n"


def transfers(stages: int) -> list[Transfer]:
    return [Transfer(j, j + 1) for j in range(stages - 1)]


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.csv").write_text(OWN, encoding="utf-8")
    return str(tmp_path / "own.csv")


def test_a_file_is_drawn_with_its_numbers(own: str) -> None:
    assert drawing([own]).splitlines()[:5] == [
        "time      0   1   2   3   4   5   6   7   8",
        "device 0  0F0 0F1 .   .   0B0 0W0 .   0B1----",
        "device 1  .   1F0 1B0---- 1F1 1B1---- .   .",
        "",
        "2 devices, 2 stages, 2 micro-batches: 9 slots, bubble 33 %; activations kept at most: 2, 1",
    ]


def test_a_file_that_never_ends_where_messages_block_says_so(tmp_path: Path) -> None:
    own = tmp_path / "own.csv"
    own.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", encoding="utf-8")
    assert "note: never ends where messages block: " in drawing([str(own)])


def test_each_kind_of_file(own: str, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"x{suffix}") for suffix in schedule_files.WRITERS]
    text = drawing([own, *(f"out={path}" for path in paths)])
    assert [line for line in text.splitlines() if line.startswith("written")] == [f"written  {path}" for path in paths]
    table, trace, document, picture = map(Path, paths)
    passes = action_file.read(own).only_passes()
    assert action_file.read(document).tasks() == action_file.read(table).tasks() == passes.tasks()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(Trace.load(trace).spans) >= 9


@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_a_file_in_another_format_has_the_same_cells(suffix: str, tmp_path: Path) -> None:
    """Overlapped pairs, messages, what FSDP does, and waiting, too."""
    own = tmp_path / "own.csv"
    own.write_text("0UNSHARD,0F0,,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
                   "1RECV_F0,1F0,1RECV_F1,(1F1;1B0)OVERLAP_F_B,1SEND_B0,1B1,1SEND_B1\n", encoding="utf-8")  # fmt: skip
    drawing([str(own), f"out={tmp_path / 'other'}{suffix}"])
    assert action_file.read(tmp_path / f"other{suffix}") == action_file.read(own)


def test_a_named_schedule_becomes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "zbv.csv"
    drawing(["zbv", "stages=4", "micro_batches=4", f"out={path}"])
    assert schedule_files.read(str(path)) == zbv(4, 2, transfers(4))


@pytest.mark.parametrize("rule", ["fifo", "forward_first", "backward_first", "alternate"])
def test_a_schedule_with_a_rule_becomes_the_order_that_is_drawn(rule: str, tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    drawn = drawing(["message_driven", "stages=5", "micro_batches=9", "limit=5", f"rule={rule}", f"out={path}"])
    assert drawing([str(path)]).partition("\n\n")[0] == drawn.partition("\n\n")[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["out=x.doc"], "ends in none of .csv, .trace.json.gz, .json, .png"),
        (["stages=2"], "is no key of a file"),
        (["out=/dev/null/x.png"], "cannot be written"),
    ],
)
def test_what_is_refused(own: str, arguments: list[str], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        drawing([own, *arguments])


def test_a_schedule_with_collectives_is_no_list_of_actions(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="has no action for") as caught:
        drawing(["data_parallel", "kind=zero3", f"out={tmp_path / 'x.csv'}"])
    assert [problem.key for problem in refused(caught)] == ["out"]


@pytest.mark.parametrize(("n", "m"), [(2, 2), (4, 8), (3, 5)])
def test_what_devices_keep_is_as_in_the_papers(n: int, m: int) -> None:
    """GPipe keeps all micro-batches; 1F1B as many as stages follow, its own one included; ZB-V 2n halves."""
    kept = schedule_files.kept_activations
    chain = transfers(n)
    assert kept(schedule_files.unit_time(fill_drain(m, range(n), chain))) == dict.fromkeys(range(n), m)
    one = kept(schedule_files.unit_time(one_f_one_b(m, range(n), chain)))
    assert one == {device: min(m, n - device) for device in range(n)}
    if m >= 2 * n - 1:
        assert max(kept(schedule_files.unit_time(zbv(m, n, transfers(2 * n)))).values()) == 2 * n
