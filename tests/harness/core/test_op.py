from __future__ import annotations

import pickle
from pathlib import Path
from typing import get_args

import mypy.api
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.op import Kind, Op

numbers = st.integers(0, 10**6)
ops = st.builds(
    Op,
    stage=numbers,
    kind=st.sampled_from(get_args(Kind)),
    micro_batch=st.none() | numbers,
    part=st.text("abc/_.:<0123456789", max_size=8),
    peer=st.none() | numbers,
)


@given(ops)
def test_notation_parses_back(op: Op) -> None:
    assert Op.parse(str(op)) == op


@pytest.mark.parametrize(
    ("text", "op"),
    [
        ("2F0", Op(2, "F", 0)),
        ("2R10", Op(2, "R", 10)),
        ("0B3", Op(0, "B", 3)),
        ("12W3", Op(12, "W", 3)),
        ("3copy0<2", Op(3, "copy", 0, peer=2)),
        ("3copy0<0:up", Op(3, "copy", 0, "up", peer=0)),
        ("1send4<2", Op(1, "send", 4, peer=2)),
        ("1collective:bucket 2", Op(1, "collective", part="bucket 2")),
        ("1step", Op(1, "step")),
    ],
)
def test_notation(text: str, op: Op) -> None:
    assert str(op) == text
    assert Op.parse(text) == op


@pytest.mark.parametrize("text", ["", "F0", "2", "2X0", "2F0 ", " 2F0", "2F-1", "2F0<", "2F0:", "2f0", "2F0<1<2"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an op: expected something like 2F0"):
        Op.parse(text)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kind is one of F, B, W, R, .*, not 'G'"):
        Op(0, "G")  # type: ignore[arg-type]


def test_bytes_and_queue_do_not_make_another_op() -> None:
    assert Op(1, "copy", 0, peer=0, bytes=8, queue="copy in") == Op(1, "copy", 0, peer=0)
    assert len({Op(1, "F", 0, bytes=8), Op(1, "F", 0), Op(1, "F", 1)}) == 2


@pytest.mark.parametrize(
    ("text", "forward"),
    [
        ("2F0", True), ("2B0", False), ("2R0", False), ("2step", False), ("2collective", False),
        ("2copy0<1", True), ("1copy0<2", False),   # arrives from the stage after "<"
        ("2recv0<1", True), ("1recv0<2", False),
        ("1send0<2", True), ("2send0<1", False),   # goes to the stage after "<"
    ],
)  # fmt: skip
def test_forward_is_what_travels_with_the_data(text: str, forward: bool) -> None:
    assert Op.parse(text).forward is forward


@pytest.mark.full
def test_no_code_changes_an_op(tmp_path: Path) -> None:
    """mypy sees to it, as for a frozen dataclass."""
    (tmp_path / "code.py").write_text('from harness.core.op import Op\nop = Op(1, "F")\nop.micro_batch = 2\n')
    found, _, failed = mypy.api.run(["--follow-imports=silent", str(tmp_path / "code.py")])
    assert failed and 'Property "micro_batch" defined in "Op" is read-only' in found


def test_an_op_is_small() -> None:
    """Schedules hold hundreds of thousands of them."""
    op = Op(1, "copy", 0, "up", 0, 8, "network")
    assert not hasattr(op, "__dict__")
    again = pickle.loads(pickle.dumps(op))
    assert (again, again.bytes, again.queue) == (op, 8, "network")
