"""From the overrides of a sweep, and its file, to its points."""

import itertools
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cli.compose import compose
from harness.config import registry
from harness.core.problem import CannotRun
from harness.sweep.points import Point, expand, scale_of
from tests.problems import Row, refused, rows
from tests.tiers import examples

LISTS = st.dictionaries(
    st.sampled_from(["batch.size", "steps", "seed", "engine.threads"]),
    st.lists(st.integers(1, 99), min_size=1, max_size=3, unique=True),
    min_size=1,
)


def overrides(*given: str) -> list[tuple[str, ...]]:
    return [point.overrides for point in expand(given)]


@settings(max_examples=examples(20))
@given(LISTS)
def test_expand_is_the_product(lists: dict[str, list[int]]) -> None:
    typed = [f"{key}={','.join(map(str, values))}" for key, values in lists.items()]
    product = itertools.product(*([f"{key}={value}" for value in values] for key, values in lists.items()))
    assert overrides(*typed) == list(product)


@pytest.mark.parametrize(("name", "fixes"), [("smok", ["+sweeps=smoke"]), ("nope", []), ("xyz", [])])
def test_a_sweep_that_does_not_exist_is_another_one_only_if_that_is_similar(name: str, fixes: list[str]) -> None:
    with pytest.raises(CannotRun) as caught:
        expand([f"+sweeps={name}"])
    assert rows(refused(caught)) == [("+sweeps", name, fixes)]
    assert "smoke" in refused(caught)[0].message


def test_the_ways_to_give_several_values() -> None:
    assert overrides("batch.size=range(2,8,2)") == [("batch.size=2",), ("batch.size=4",), ("batch.size=6",)]
    assert overrides("engine=choice(gpipe,single)") == [("engine=gpipe",), ("engine=single",)]
    assert overrides("precision=glob(fp*)") == [("precision=fp16",), ("precision=fp32",), ("precision=fp64",)], (
        "schemas are no choices"
    )
    assert overrides("a=[1,2]", "b='x,y'") == [("a=[1,2]", "b='x,y'")], "a list and a quoted text are one value"


def test_an_id_depends_on_the_content_alone() -> None:
    (first,), (second,) = expand(["steps=3", "optimizer.lr=1e-3", "out=x"]), expand(["optimizer.lr=0.001", "steps=3"])
    assert first.id == second.id
    ids = {point.id for point in expand(["steps=1,2,3", "engine.streams=true,false"])}
    assert len(ids) == 6
    assert Point.of(["steps=3"]).id == "f3b4bae199", "a change of ids makes every sweep run again"


def test_equal_points_run_once() -> None:
    assert overrides("steps=3,3,4") == [("steps=3",), ("steps=4",)]


def file(root: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (root / "sweeps").mkdir()
    (root / "sweeps" / "mine.yaml").write_text(text)
    monkeypatch.setattr(registry, "ROOT", root)


@pytest.mark.usefixtures("computation")
@pytest.mark.parametrize("path", sorted((registry.ROOT / "sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_sweep_composes_and_says_how_to_use_it(path: Path) -> None:
    text = path.read_text()
    comment = text[: next(text.index(key) for key in ("schemes:", "scales:", "points:", "grid:") if key in text)]
    assert f"python run.py -m +sweeps={path.stem}" in comment
    for scale in yaml.safe_load(text).get("scales", {"": None}):
        seen: set[str] = set()  # thousands of points of a product say nothing new
        for point in expand([f"+sweeps={path.stem}", *([f"scale={scale}"] if scale else [])], races="schemes:" in text):
            if not seen.issuperset(point.overrides):
                compose(point.overrides)
                seen.update(point.overrides)


def test_points_grid_and_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
        points:
          - [engine=single, steps=1]
          - [engine=gpipe, "batch.size=8,16", steps=1]
        grid:
          seed: [0, 1]
          tracker: none
          warmup: 1,2
    """
    file(tmp_path, monkeypatch, text)
    assert overrides("+sweeps=mine", "warmup=3", "steps=5") == [
        ("engine=single", "steps=5", "seed=0", "tracker=none", "warmup=3"),
        ("engine=single", "steps=5", "seed=1", "tracker=none", "warmup=3"),
        ("engine=gpipe", "batch.size=8", "steps=5", "seed=0", "tracker=none", "warmup=3"),
        ("engine=gpipe", "batch.size=8", "steps=5", "seed=1", "tracker=none", "warmup=3"),
        ("engine=gpipe", "batch.size=16", "steps=5", "seed=0", "tracker=none", "warmup=3"),
        ("engine=gpipe", "batch.size=16", "steps=5", "seed=1", "tracker=none", "warmup=3"),
    ]
    assert len(expand(["+sweeps=mine"])) == 2 * 2 + 2 * 2 * 2


def test_a_grid_alone_is_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file(tmp_path, monkeypatch, "grid: {engine.streams: [true, false], profile: [null, x.json], steps: 'range(1,3)'}")
    assert overrides("+sweeps=mine")[:3] == [
        ("engine.streams=true", "profile=null", "steps=1"),
        ("engine.streams=true", "profile=null", "steps=2"),
        ("engine.streams=true", "profile=x.json", "steps=1"),
    ]
    assert len(overrides("+sweeps=mine")) == 8


SCALES = """
    scales:
      small:
        points: [[steps=1], [steps=2]]
        grid: {tracker: none}
      large:
        grid: {steps: [100, 200], tracker: none}
"""


def test_a_scale_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file(tmp_path, monkeypatch, SCALES)
    small = [("steps=1", "tracker=none"), ("steps=2", "tracker=none")]
    assert overrides("+sweeps=mine") == overrides("+sweeps=mine", "scale=small", "out=x") == small
    assert overrides("+sweeps=mine", "scale=large", "seed=3") == [
        ("steps=100", "tracker=none", "seed=3"),
        ("steps=200", "tracker=none", "seed=3"),
    ]
    assert scale_of(["+sweeps=mine"]) == "small"
    assert scale_of(["+sweeps=mine", "scale=large"]) == "large"
    assert scale_of(["steps=1,2"]) is None


@pytest.mark.parametrize(
    ("text", "typed", "expected"),
    [
        (SCALES, "scale=tiny", ("scale", "tiny", ["scale=small"])),
        (SCALES, "scale=la", ("scale", "la", ["scale=large"])),
        (SCALES, "scale=small,large", ("scale", "small,large", [])),
        ("points: [[steps=1]]", "scale=small", ("scale", "small", ["without scale"])),
        ("{points: [[steps=1]], scales: {a: {}}}", "steps=1", ("sweeps/mine.yaml", None, [])),
        ("scales: [a]", "steps=1", ("sweeps/mine.yaml scales", None, [])),
        ("scales: {a: {pionts: 3}}", "steps=1", ("sweeps/mine.yaml scales.a", None, [])),
        ("scales: {a: {points: [[scale=b]]}}", "steps=1", ("sweeps/mine.yaml scales.a points[0] scale=b", None, [])),
    ],
)
def test_a_scale_that_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, typed: str, expected: Row
) -> None:
    file(tmp_path, monkeypatch, text)
    assert wrong("+sweeps=mine", typed) == expected


def test_a_scale_without_a_file() -> None:
    assert wrong("steps=1,2", "scale=paper") == ("scale", "paper", ["without scale"])


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("pionts: [[steps=1]]", "sweeps/mine.yaml"),
        ("points: [steps=1]", "sweeps/mine.yaml points[0]"),
        ("points: [[{steps: 1}]]", "sweeps/mine.yaml points[0]"),
        ("points: []", "sweeps/mine.yaml points"),
        ("grid: {steps: []}", "sweeps/mine.yaml grid steps"),
        ("grid: {steps: range(0)}", "sweeps/mine.yaml grid steps=range(0)"),
        ("grid: [steps]", "sweeps/mine.yaml grid"),
        ("points: [[steps]]", "sweeps/mine.yaml points[0] steps"),
        ("points: [[out=x]]", "sweeps/mine.yaml points[0] out=x"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, key: str) -> None:
    file(tmp_path, monkeypatch, text)
    assert wrong("+sweeps=mine") == (key, None, [])


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("+sweeps=smok", ("+sweeps", "smok", ["+sweeps=smoke"])),
        ("+sweeps=smoke,smoke", ("+sweeps", "smoke,smoke", [])),
        ("steps=interval(1,2)", ("steps=interval(1,2)", None, [])),
        ("steps=[", ("steps=[", None, [])),
        ("steps=range(3,3)", ("steps=range(3,3)", None, [])),
        ("engine=glob(nothing*)", ("engine=glob(nothing*)", None, [])),
    ],
)
def test_a_command_line_that_is_wrong(typed: str, expected: Row) -> None:
    assert wrong(typed) == expected


def wrong(*typed: str) -> Row:
    with pytest.raises(CannotRun) as caught:
        expand(typed)
    (found,) = rows(refused(caught))
    return found


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "values",
    [
        *("range(1,1e9)", "range(1,-1e9,-1)", "range(1,inf)", "range(nan,3)", "range(0,1,1e-300)"),
        *("shuffle(range(1,1e9))", "sort(range(1,1e9),reverse=true)"),
    ],
)
def test_more_values_than_anyone_could_wait_for(values: str) -> None:
    assert wrong(f"steps={values}") == (f"steps={values}", None, [])


def test_more_points_than_anyone_could_wait_for() -> None:
    assert wrong("steps=range(1000)", "seed=range(1000)", "warmup=2") == ("steps, seed", None, [])


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        (
            b"points:\n  - [engine=single\ngrid: {}\n",
            "PATH, line 3",
            "cannot be read: expected ',' or ']', but got ':'",
        ),
        (b"grid: {steps: 1}\ngrid: {seed: 1}\n", "PATH, line 2", "cannot be read: found duplicate key grid"),
        (b'grid: "\xff"', "PATH", "invalid start byte"),
        (b'grid: "\x01"', "PATH", "special characters are not allowed"),
    ],
)
def test_a_file_that_is_no_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes, place: str, what: str
) -> None:
    file(tmp_path, monkeypatch, "")
    path = tmp_path / "sweeps" / "mine.yaml"
    path.write_bytes(text)
    with pytest.raises(CannotRun) as caught:
        expand(["+sweeps=mine"])
    (problem,) = caught.value.problems
    assert problem.key == place.replace("PATH", str(path)) and what in problem.message, problem
