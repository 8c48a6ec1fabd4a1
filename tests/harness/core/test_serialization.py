from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core import serialization
from harness.core.cluster import Cluster, Device, Link
from harness.core.model_profile import LayerProfile, ModelProfile, Skip, Tied
from harness.core.op import Op
from harness.core.pattern import Pattern, Placed
from harness.core.plan import Mesh, Plan, Traffic
from harness.core.problem import Problem
from harness.core.products import Product
from harness.core.record import EXIT_CODES, RunRecord, Status
from harness.core.serialization import Document, SchemaError, decode, encode
from harness.schedule import Schedule
from harness.schedule.builders.gpipe import gpipe
from harness.schedule.transfers import Transfer

counts = st.integers(0, 10**15)
amounts = st.floats(0, 1e6)
names = st.text(max_size=5)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=5,
)
objects = st.dictionaries(names, json_values, max_size=3)

layers = st.builds(
    LayerProfile,
    name=names,
    forward_s=amounts,
    flops=amounts,
    param_bytes=st.just(10**15),
    tied=st.lists(st.builds(Tied, name=names, bytes=st.integers(0, 10**9)), max_size=2, unique_by=lambda t: t.name).map(
        tuple
    ),
    products=st.lists(st.builds(Product, name=names, in_=counts, heads=counts), max_size=2).map(tuple),
)
profiles = st.lists(layers, min_size=2, max_size=4).flatmap(
    lambda found: st.builds(
        ModelProfile,
        layers=st.just(tuple(found)),
        micro_batch=st.integers(1, 10**15),
        skips=st.lists(st.builds(Skip, source=st.just(0), target=st.just(len(found) - 1), bytes=counts)).map(tuple),
    )
)
placed = st.builds(
    Placed,
    op=st.builds(Op, stage=counts, kind=st.just("F"), bytes=counts),
    device=counts,
    start_s=amounts,
    shift=counts,
)
numbers = st.lists(counts, max_size=3).map(tuple)
plans = st.builds(
    lambda balance, *others: Plan(Mesh(1, len(balance), 1), Plan.contiguous(balance).stages, 4, *others),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.sampled_from(["always", "except_last", "never"]),
    st.dictionaries(names, numbers, max_size=2),
    st.dictionaries(names, st.lists(numbers, max_size=3).map(tuple), max_size=2),
    st.lists(st.lists(st.builds(Traffic, names, names, amounts, counts), max_size=2).map(tuple), max_size=2).map(tuple),
    st.none() | st.builds(Pattern, period_s=st.floats(1e-9, 1e9), ops=st.lists(placed, max_size=2).map(tuple)),
    st.lists(st.lists(names, max_size=3).map(tuple), max_size=2).map(tuple),
    objects,
)
clusters = st.builds(
    Cluster,
    name=names,
    nodes=counts,
    device=st.builds(Device, name=names, memory_bytes=counts, peak_flops=st.dictionaries(names, amounts, max_size=2)),
    intra=st.builds(Link, alpha_s=amounts, beta_s_per_byte=amounts, duplex=st.sampled_from(["full", "half"])),
)
schedules = st.builds(
    lambda m, n, streams: gpipe(m, range(n), [Transfer(j, j + 1, bytes=7) for j in range(n - 1)], streams=streams),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
)
records = st.builds(
    RunRecord,
    id=names,
    status=st.sampled_from(list(EXIT_CODES)),
    config=objects,
    plan=st.none() | objects,
    metrics=objects,
    trace=st.none() | names,
)


@pytest.mark.usefixtures("computation")
@given(st.one_of(profiles, plans, clusters, schedules, records))
def test_documents_come_back_from_json_as_they_were(document: Document) -> None:
    text = json.dumps(document.to_json())
    back = type(document).from_json(json.loads(text))
    assert back == document
    assert json.dumps(back.to_json()) == text  # also what `==` leaves out: bytes and queues of ops


def test_a_trailing_underscore_is_for_python_only(tmp_path: Path) -> None:
    profile = ModelProfile((LayerProfile("l", products=(Product("p", in_=3, out=4),)),))
    profile.save(tmp_path / "profile.json")
    written = json.loads((tmp_path / "profile.json").read_text())
    assert written["schema"] == 2
    assert written["layers"][0]["products"][0] == {
        "name": "p", "kind": "linear", "rows_per_sample": 1, "in": 3, "out": 4, "weight_bytes": 0, "heads": 1,
        "image": [], "frozen": False,
    }  # fmt: skip
    assert ModelProfile.load(tmp_path / "profile.json") == profile


@dataclass(frozen=True)
class Inner:
    size: int
    label: str = "none"


@dataclass(frozen=True)
class Outer(Document):
    inner: Inner
    rate: float = 0.0
    on: bool = False
    mode: Literal["a", "b"] = "a"
    pair: tuple[int, str] = (0, "")
    inners: tuple[Inner, ...] = ()
    by_number: dict[int, float] = field(default_factory=dict)
    maybe: int | str | None = None
    anything: Any = None

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"rate is {self.rate}, must be at least 0")


def test_every_kind_of_field() -> None:
    full = Outer(Inner(1), 2.0, True, "b", (3, "x"), (Inner(4), Inner(5, "y")), {6: 7.0}, "z", [None])
    assert Outer.from_json(json.loads(json.dumps(full.to_json()))) == full
    assert Outer.from_json({"inner": {"size": 2.0}, "rate": 3}) == Outer(Inner(2), 3.0)
    assert encode({"a": (Inner(1),)}) == {"a": [{"size": 1, "label": "none"}]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inner": {"size": "3"}}, "inner.size: expected a whole number, got '3'"),
        ({"inner": {"size": 1.5}}, "inner.size: expected a whole number, got '1.5'"),
        ({"inner": {"size": True}}, "inner.size: expected a whole number, got 'True'"),
        ({"inner": {"size": None}}, "inner.size: expected a whole number, got 'None'"),
        ({"inner": {}}, "inner.size: expected a value, got 'nothing'"),
        (
            {"inner": {"size": 1, "sise": 2}},
            r"inner: expected only the keys of Inner \(size, label\), got \"\['sise'\]\"",
        ),
        ({"inner": [1]}, r"inner: expected an object \(Inner\), got '\[1\]'"),
        ({"rate": "fast"}, "rate: expected a number, got 'fast'"),
        ({"rate": True}, "rate: expected a number, got 'True'"),
        ({"rate": -1}, "rate is -1.0, must be at least 0"),
        ({"on": 1}, "on: expected a bool, got '1'"),
        ({"mode": "c"}, "mode: expected one of a, b, got 'c'"),
        ({"pair": [1]}, r"pair: expected a list of 2, got '\[1\]'"),
        ({"pair": [1, 2]}, r"pair\[1\]: expected a str, got '2'"),
        ({"inners": [{"size": 1}, {"size": []}]}, r"inners\[1\].size: expected a whole number"),
        ({"by_number": {"1": "x"}}, "by_number.1: expected a number"),
        ({"by_number": []}, "by_number: expected an object"),
        ({"maybe": 1.5}, "maybe: expected a whole number.*; maybe: expected a str"),
        ({"schema": 2}, "schema: expected 1 for a Outer, got '2'"),
        ({"extra": 1}, "the document: expected only the keys of Outer"),
    ],
)
def test_what_is_wrong_is_refused_with_its_path(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        Outer.from_json({"inner": {"size": 1}, **changes})


@pytest.mark.parametrize("value", [None, [], 3, "text"])
def test_a_document_is_an_object(value: Any) -> None:
    with pytest.raises(SchemaError, match=r"expected an object \(Outer\)"):
        Outer.from_json(value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "plan.json is not JSON"),
        (b"\xff\xfe", "plan.json is not JSON"),
        (b"", "plan.json is not JSON"),
        (b'{"mesh": {}}', "plan.json: stages: expected a value, got 'nothing'"),
        (b'{"mesh": {}, "stages": []}', "plan.json: Plan: a plan needs at least one stage"),
        (b'{"mesh": {"data": "x"}, "stages": []}', "plan.json: mesh.data: expected a whole number, got 'x'"),
    ],
)
def test_a_file_that_is_no_plan_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(SchemaError, match=message):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf")])
def test_profiles_refuse_impossible_times(number: float) -> None:
    with pytest.raises(SchemaError, match=f"forward_s of layer 'conv' is {number}, must be a number of at least 0"):
        ModelProfile.from_json({"layers": [{"name": "conv", "forward_s": number}]})


@pytest.mark.parametrize(("source", "target"), [(1, 1), (1, 0), (-1, 1), (0, 2)])
def test_profiles_refuse_skips_that_do_not_go_forward(source: int, target: int) -> None:
    with pytest.raises(ValueError, match=f"from layer {source} to {target}: it must go forward within the 2 layers"):
        ModelProfile((LayerProfile(), LayerProfile()), skips=(Skip(source, target, 1),))


def test_profile_sums_and_skips() -> None:
    """
    layer   0   1   2   3   4
    skip    s-----------t           a
                s-------t           b
                    s-------t       c
    """
    skips = (Skip(0, 3, 1, "a"), Skip(1, 3, 2, "b"), Skip(2, 4, 4, "c"))
    profile = ModelProfile(
        tuple(LayerProfile(f"{i}", output_bytes=10**i) for i in range(5)), input_bytes=7, skips=skips
    )

    def called(found: list[Skip]) -> str:
        return "".join(skip.name for skip in found)

    into, out_of = profile.skips_into, profile.skips_out_of
    assert [called(into(2, 3)), called(into(1, 4)), called(into(3, 4))] == ["ab", "a", "abc"]
    assert [called(out_of(0, 1)), called(out_of(1, 3)), called(profile.skips_over(2, 2))] == ["ab", "c", "ab"]
    assert [profile.boundary_bytes(layer) for layer in range(3)] == [7, 1, 10]
    assert profile.sum("output_bytes", 1, 3) == 1110


def test_every_status_has_an_exit_code_and_only_ok_is_zero() -> None:
    assert set(EXIT_CODES) == set(Status.__args__)  # type: ignore[attr-defined]
    assert [status for status, code in EXIT_CODES.items() if code == 0] == ["ok"]
    with pytest.raises(SchemaError, match="status: expected one of running, ok, oom"):
        RunRecord.from_json({"id": "x", "status": "fine"})


def test_schedule_keeps_the_order_of_its_lanes() -> None:
    schedule = gpipe(2, [0, 1], [Transfer(0, 1)])
    assert decode(Schedule, encode(schedule)).by_queue() == schedule.by_queue()


def test_what_is_not_finite_is_null_and_never_in_a_file(tmp_path: Path) -> None:
    inf, nan = float("inf"), float("nan")
    assert serialization.finite({"a": [1.5, nan, {"b": -inf}], "c": "x", "d": None}) == {
        "a": [1.5, None, {"b": None}], "c": "x", "d": None
    }  # fmt: skip
    with pytest.raises(ValueError, match="not JSON compliant"):
        RunRecord("1", "ok", metrics={"loss": nan}).save(tmp_path / "record.json")
    assert not list(tmp_path.iterdir())
    RunRecord("1", "infeasible", problems=(Problem("jitter", nan, "is no number"),)).save(tmp_path / "record.json")
    assert RunRecord.load(tmp_path / "record.json").problems[0].value is None


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "[" * 70 + "]" * 70, '{"a": ' * 70 + "1" + "}" * 70, "1" * 400, "1" * 5000, "\xff", "", "nul"],
)
def test_a_text_that_nobody_can_work_with_is_refused(text: str) -> None:
    with pytest.raises(SchemaError):
        serialization.parse(text.encode("latin-1"))


@pytest.mark.parametrize("value", [10**30, -(10**30), 1e30])
def test_a_whole_number_fits_64_bits(value: float) -> None:
    with pytest.raises(SchemaError, match="input_bytes: expected a whole number that fits 64 bits"):
        ModelProfile.from_json({"schema": 2, "layers": [{"name": "a"}], "input_bytes": value})


def test_layers_that_differ_in_their_name_alone() -> None:
    """They are decoded once, and nothing that differs is: 1, 1.0 and true are three values."""
    layer: dict[str, Any] = {"flops": 1, "products": [{"name": "q", "in": 3}, {"name": "k", "in": 3}]}
    other = layer | {"products": [{"name": "q", "in": 4}]}
    written = [layer | {"name": "a"}, layer | {"name": "b"}, other | {"name": "c"}, layer | {"name": "b", "flops": 2}]
    found = ModelProfile.from_json({"layers": written}).layers
    assert [(one.name, one.flops, [(of.name, of.in_) for of in one.products]) for one in found] == [
        ("a", 1, [("q", 3), ("k", 3)]),
        ("b", 1, [("q", 3), ("k", 3)]),
        ("c", 1, [("q", 4)]),
        ("b", 2, [("q", 3), ("k", 3)]),
    ]
    assert found[0].products is found[1].products


@pytest.mark.parametrize("wrong", [{"flops": True}, {"flops": 1, "name": 1}, {"flops": 1, "no": 1}])
def test_a_wrong_layer_after_one_that_is_like_it(wrong: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match=r"layers\[1\]"):
        ModelProfile.from_json({"layers": [{"name": "a", "flops": 1}, {"name": "b"} | wrong]})
