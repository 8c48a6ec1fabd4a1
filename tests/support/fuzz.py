"""Strategies for what a user may give: overrides, YAML files, profiles and records, most of them broken."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from omegaconf import DictConfig, OmegaConf

from harness.cli.compose import CONF, compose
from harness.config import registry
from harness.config.key_names import leaves
from harness.core.model_profile import LayerProfile, ModelProfile, Skip

ENGINES = sorted(name for group, name in registry.schemas() if group == "engine")
CLUSTERS = ("flat", "h200", "p40x8", "summit")
WORKING = ("checkpoint", "always", "never", "sgd", "adam", "half", "effective", "none", "measured", "scaled", "float16")
WHOLE = ("0", "1", "2", "3", "4", "5", "6", "8", "12", "16", "100", "1000", "1000000000000", "2147483648", str(2**63))
REAL = (*WHOLE, "1e-3", "0.5", "1e10", "1e15", "1e-9", "1e-15", "1e300", "5e-324")
WILD = (
    *(
        "1" + "0" * 30,
        "-1" + "0" * 30,
        "1" + "0" * 400,
        "1" + "0" * 5000,
        "1e400",
        "-1e400",
        "nan",
        "inf",
        "-1",
        "null",
    ),
    *("[]", "{}", "[8,[8]]", "[[[]]]", "{a: {b: [1]}}", "[null]", "[true,x]", "[1e400]", "['a','b']", "''", "'\\''"),
    *("${seed}", "${x.y}", "${", "'${'", "???", "${stages_of:3}", "${model}", "${.name}", "${oc.env:NOT_THERE}"),
    *("choice(1,2)", "range(3)", "1,2", "int(3)", "json_str(3)", "~", "*", "\\", "é", "\x00", "a\nb", "x" * 300),
    *("[" * 200 + "]" * 200, "{a:" * 100 + "1" + "}" * 100, "(" * 3000, "/dev/null", "/", "true", "0x10", "1:2"),
)
GROUPS_OF_KEYS = ("batch", "mesh", "optimizer", "cluster.peak_tflops", "model", "x", "", "a.b", "batch.size.x", "hydra")


def profile(layers: int) -> dict[str, Any]:
    """The JSON of a profile that can be planned for."""
    sizes = {"param_bytes": 4096, "output_bytes": 8192, "saved_bytes": 8192, "working_bytes": 100}
    each = [LayerProfile(f"layer{n}", 1e-3, 2e-3, 1e6, 1e5, 1e4, 3, **sizes) for n in range(layers)]
    skips = (Skip(0, layers - 1, 100, "long"),) if layers > 3 else ()
    return ModelProfile(tuple(each), "mlp", 2, input_bytes=1024, skips=skips, source="measured here").to_json()


def _typed(default: Any) -> SearchStrategy[str]:
    """A value of the type that a key has by default."""
    if isinstance(default, bool):
        return st.sampled_from(["true", "false"])
    if isinstance(default, list):
        return st.lists(st.sampled_from(WHOLE[:12]), max_size=4).map(lambda items: f"[{','.join(items)}]")
    return st.sampled_from(WORKING if isinstance(default, str) else WHOLE if isinstance(default, int) else REAL)


@st.composite
def overrides(draw: st.DrawFn) -> list[str]:
    """A run that could be planned (`profile=` is to be added), with some keys changed."""
    begin = [f"mode={draw(st.sampled_from(['plan', 'simulate', 'tune']))}", f"engine={draw(st.sampled_from(ENGINES))}"]
    begin += [f"cluster={draw(st.sampled_from(CLUSTERS))}", "tracker=none"]
    config = compose(["mode=plan", *begin[1:]])
    begin += draw(st.lists(st.sampled_from(["batch.micro_batches=4", "mesh.pipeline=2", "mesh.data=2"]), max_size=1))
    keys = [key for key in leaves(config) if key not in ("mode", "out", "profile")]
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from([*keys, *GROUPS_OF_KEYS, *registry.GROUPS]))
        begin.append(draw(_override(config, key)))
    return begin


def _override(config: DictConfig, key: str) -> SearchStrategy[str]:
    value = OmegaConf.select(config, key) if key.strip(".") else None
    typed = _typed(list(value) if OmegaConf.is_list(value) else value).map(lambda text: f"{key}={text}")
    wild = st.tuples(st.sampled_from(["", "", "", "+", "++", "~"]), st.sampled_from(WILD))
    return st.one_of(typed, typed, wild.map(lambda pair: f"{pair[0]}{key}={pair[1]}"), st.just(key))


SCALARS = (
    "1",
    "-1",
    "1.5",
    "null",
    "",
    "[]",
    "{}",
    "[1, [2]]",
    "{a: b}",
    "text",
    "true",
    "1e400",
    ".nan",
    "???",
    "mlp",
)
SCALARS += ("1" + "0" * 30, "1" + "0" * 5000, "${x}", "${devices}", "'${'", "2020-01-01", "!!binary aGk=", "{1: 2}")
SCALARS += ("[[engine=gpipe]]", "{steps: [1, 2]}", "{a: {points: [[steps=1]]}}", "[[3]]", "{steps: []}", "[['=']]")
SCALARS += ("{steps: 'range(1,5,0)'}", "{steps: 'range(0,1000000000)'}", "{null: 3}", "{steps: 'range(1,2'}", "&a [*a]")
ENTRIES = (
    "_self_",
    "_{schema}",
    "_cluster",
    "_gpipe",
    "_mlp",
    "nothere",
    "z",
    "3",
    "null",
    "[]",
    "{a: b}",
    "''",
    "a@b:c",
)
ENTRIES += (
    "{override /engine: gpipe}",
    "{override /engine: nothere}",
    "{override engine: 3}",
    "${x}",
    "../x",
    "/config",
)
KEYS = {
    "cluster": ("name", "devices", "memory_gb", "bandwidth_gb_s", "peak_tflops", "effective", "alpha_s", "values"),
    "model": ("name", "widths", "size", "layers"),
    "precision": ("name", "dtype", "autocast"),
    "sweeps": ("points", "grid", "scales"),
}
SCHEMA_OF = {
    "cluster": "cluster",
    "precision": "precision",
    "model": "mlp",
    "engine": "gpipe",
    "planner": "balance@planner",
}
HEADS = ("", "", "", "# @package _global_\n", "# @package x\n", "# @package\n", "# @package a.b\n", "# @x\n")
WHOLE_FILES = (
    *(
        "",
        "[]",
        "- a\n- b",
        "3",
        "text",
        "{}",
        "a: 1\n---\nb: 2",
        "\t",
        "%YAML 9.9\n---\na: 1",
        "&a [*a]",
        "a: &a {b: *a}",
    ),
    *("!!python/object/apply:os.system ['echo hi']", "!!set {x}", "!!timestamp x", "? [1]\n: 2", "1: 2", "null: 3"),
    *("[" * 3000, "a: " + "[" * 3000 + "]" * 3000, "{" * 500, "x: " + "1" * 5000, "a: .inf", "<<: 3", "a: ${", "\x00"),
    "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]",
)


@st.composite
def yaml_file(draw: st.DrawFn, group: str) -> bytes:
    """A file of keys: as a user may write one, one of conf/ that lost or got some letters, or anything."""
    kind = draw(st.sampled_from(["keys", "keys", "mutated", "whole", "bytes"]))
    if kind == "bytes":
        return draw(st.binary(max_size=100))
    if kind == "whole":
        return draw(st.sampled_from(WHOLE_FILES)).encode()
    if kind == "mutated":
        folder = registry.ROOT if group == "sweeps" else CONF
        return draw(_mutated_text(sorted((folder / group).glob("*.yaml")))).encode()
    entries = draw(st.lists(st.sampled_from(ENTRIES), max_size=3))
    defaults = draw(st.sampled_from(["", "defaults:\n", "defaults: 3\n", "defaults: [_{schema}, _self_]\n", "listed"]))
    text = f"defaults: [{', '.join(entries)}]\n" if defaults == "listed" else defaults
    names = st.sampled_from(KEYS.get(group, ("name", "checkpoint", "balance", "x")))
    lines = draw(st.dictionaries(names, st.sampled_from(SCALARS), max_size=3))
    body = "".join(f"{key}: {value}\n" for key, value in lines.items())
    return (draw(st.sampled_from(HEADS)) + text.replace("{schema}", SCHEMA_OF.get(group, "none")) + body).encode()


@st.composite
def _mutated_text(draw: st.DrawFn, paths: Sequence[Path]) -> str:
    text = draw(st.sampled_from(paths)).read_text(encoding="utf-8")
    for _ in range(draw(st.integers(1, 4))):
        at, gone = draw(st.integers(0, len(text))), draw(st.integers(0, 30))
        text = text[:at] + draw(st.sampled_from(["", *"[]{}:,-#&*!|>'\"%\n\t?$0~", "- ", "null"])) + text[at + gone :]
    return text


JUNK = (
    None,
    True,
    0,
    -1,
    1,
    2,
    1.5,
    10**30,
    10**400,
    -(10**30),
    1e308,
    5e-324,
    2**63,
    2**31,
    10**15,
    10**14,
    1e15,
    1e21,
)
JUNK += ("", "x", "x" * 500, "1e400", "\x00", "<!--<script>", "0", float("inf"), float("nan"))
NOT_DOCUMENTS = (
    *(
        "[" * 100000,
        '{"a":' * 100000,
        "[" * 900 + "]" * 900,
        "1" * 5000,
        "1" * 400,
        "1e400",
        "NaN",
        "",
        "null",
        "[]",
        "{}",
    ),
    *('{"layers": ' + "[" * 50000 + "]" * 50000 + "}", '{"schema": [1]}', '"\\ud800"', "tru", "\x00", "\ufeff{}"),
    '{"layers": [{"kernels": ' + "1" * 4500 + "}]}",
)


@st.composite
def mutated(draw: st.DrawFn, value: Any, times: int = 2) -> Any:
    """A JSON value in which something is other, gone, or there twice."""
    found = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, times))):
        found = _changed(draw, found)
    return found


def _changed(draw: st.DrawFn, value: Any) -> Any:
    if not (isinstance(value, dict | list) and value) or draw(st.integers(0, 9)) == 0:
        return draw(st.one_of(st.sampled_from(JUNK), st.sampled_from([[], {}, [[]], [None], {"a": 1}])))
    place: Any = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
    what = draw(st.integers(0, 9))
    if what == 0:
        del value[place]
    elif what == 1 and isinstance(value, list):
        value.insert(place, value[place])
    elif what == 1:
        value[draw(st.sampled_from(["x", "", "schema"]))] = 1
    else:
        value[place] = _changed(draw, value[place])
    return value
