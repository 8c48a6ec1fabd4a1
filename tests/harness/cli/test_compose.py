"""One complete configuration, or all that is wrong with the overrides, in the user's own keys."""

import math
import re
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import assume, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from harness.cli.compose import CONF, choices, compose, session
from harness.config import registry
from harness.config.key_names import closest_key, leaves
from harness.config.overrides import ALL_KEYS, described, quoted
from harness.core.model_profile import LayerProfile, ModelProfile
from harness.core.problem import CannotRun, Problem, advice, apply
from harness.host import devices
from tests.problems import keys, rows
from tests.tiers import later

FILES = sorted(path for group in registry.GROUPS for path in (CONF / group).glob("*.yaml"))
PUBLISHED = [path for path in FILES if path.parent.name == "model" and any(map(str.isdigit, path.stem))]
"""Models at sizes of the papers, which take longer."""


def problems(*overrides: str) -> list[Problem]:
    with pytest.raises(CannotRun) as caught:
        compose(overrides)
    return list(caught.value.problems)


def test_a_program_that_uses_hydra_itself_keeps_its_state() -> None:
    with hydra.initialize_config_dir(config_dir=str(CONF), version_base=None):
        own = GlobalHydra.instance().hydra
        assert compose(["steps=3"]).steps == 3
        assert GlobalHydra.instance().hydra is own
    assert not GlobalHydra.instance().is_initialized()


def test_defaults_are_the_command_of_the_readme() -> None:
    config = compose([])
    assert [config[group].name for group in ("engine", "model", "planner", "data")] == [
        "gpipe",
        "unet",
        "balance",
        "synthetic",
    ]
    assert (config.mode, config.batch.size, config.batch.micro_batches) == ("run", 16, 8)


def test_overrides_change_what_they_name_and_nothing_else() -> None:
    changed = OmegaConf.to_container(compose(["engine=single", "batch.size=64", "optimizer.lr=1e-3", "out='a b'"]))
    assert isinstance(changed, dict)
    default = OmegaConf.to_container(compose(["engine=single"]))
    assert isinstance(default, dict)
    default["batch"]["size"], default["optimizer"]["lr"], default["out"] = 64, 0.001, "a b"
    assert changed == default


def test_one_composition_leaves_nothing_over_for_the_next() -> None:
    default = compose([])
    compose(["batch.size=3", "engine.streams=false", "steps=${batch.size}"])
    problems("batch.micro_batches=5", "batch={size: 7, sise: 3}")
    assert compose([]) == default


def test_the_last_of_two_counts() -> None:
    config = compose(["steps=3", "engine=gpipe", "steps=4", "engine=single"])
    assert (config.steps, config.engine.name) == (4, "single")


def test_interpolations_are_resolved() -> None:
    config = compose(["batch.micro_batches=${batch.size}", "batch.size=32"])
    assert OmegaConf.to_container(config, resolve=False)["batch"]["micro_batches"] == 32  # type: ignore[index, call-overload]


@pytest.mark.parametrize("path", later(FILES, PUBLISHED), ids=lambda path: f"{path.parent.name}={path.stem}")
def test_every_choice_composes_and_says_how_to_use_it(path: Path) -> None:
    command = re.match(r"(?:#.*\n)*?#.* python run\.py ((?:\S+=\S+ ?)+)", path.read_text())
    assert command, "begins with a comment that has a command"
    typed = command[1].split()
    assert f"{path.parent.name}={path.stem}" in typed
    compose(typed)
    schema, own, *_ = OmegaConf.load(path).defaults
    assert (schema[0], own) == ("_", "_self_")


@pytest.mark.parametrize(
    ("override", "key", "value", "fixes"),
    [
        ("engine=gpip", "engine", "gpip", ["engine=gpipe"]),
        ("engine=[gpipe]", "engine", "[gpipe]", ["engine=gpipe"]),
        ("engine=_gpipe", "engine", "_gpipe", ["engine=gpipe"]),
        *[
            (f"precision={name}", "precision", name, [f"precision={right}"])
            for name, right in (("float", "fp32"), ("float32", "fp32"), ("double", "fp64"), ("bfloat16", "bf16"))
        ],
        *[
            (f"precision={name}", "precision", name, ["precision=bf16"])
            for name in ("fp8", "float8", "int4", "fp17", "half", "float16", "f16")
        ],
        *[
            (f"precision={name}", "precision", name, ["precision=mixed"])
            for name in ("bf16-mixed", "amp", "mixed_fp16")
        ],
        ("precision=low", "precision", "low", []),
        ("engine=null", "engine", "null", []),
        ("engine.name=single", "engine.name", "single", ["engine=single"]),
        ("batch.sise=3", "batch.sise", None, ["batch.size=3 without batch.sise"]),
        ("batch.sise=x", "batch.sise", None, []),
        ("bach.size=3", "bach.size", None, ["batch.size=3 without bach.size"]),
        ("micro_batches=4", "micro_batches", None, ["batch.micro_batches=4 without micro_batches"]),
        (
            "engine.checkpoints=never",
            "engine.checkpoints",
            None,
            ["engine.checkpoint=never without engine.checkpoints"],
        ),
        ("steps.x=3", "steps.x", None, []),
        ("xyzzy=3", "xyzzy", None, []),
        ("batch.size=abc", "batch.size", "abc", ["batch.size=16"]),
        ("batch.size=2.5", "batch.size", "2.5", ["batch.size=16"]),
        ("batch.size=true", "batch.size", "true", ["batch.size=16"]),
        ("batch.size=", "batch.size", "", ["batch.size=16"]),
        ("batch.size=null", "batch.size", "null", ["batch.size=16"]),
        ("mesh.pipeline=two", "mesh.pipeline", "two", ["mesh.pipeline=null"]),
        ("optimizer.lr=big", "optimizer.lr", "big", ["optimizer.lr=0.1"]),
        ("engine.streams=3", "engine.streams", "3", ["engine.streams=true", "engine.streams=false"]),
        ("engine.streams=maybe", "engine.streams", "maybe", ["engine.streams=true", "engine.streams=false"]),
        ("batch=3", "batch", "3", []),
        ("batch={sise: 3}", "batch.sise", None, []),
        ("+xyzzy=3", "xyzzy", None, []),
        ("+steps=3", "+steps", "3", ["steps=3"]),
        ("++steps=3", "++steps", "3", ["steps=3"]),
        ("++engine.new=3", "engine.new", None, []),
        ("+engine=gpipe", "+engine", "gpipe", ["engine=gpipe"]),
        ("~steps", "~steps", None, ["without ~steps"]),
        ("+sweeps=smoke", "+sweeps", "smoke", []),
        ("hydra.run.dir=x", "hydra.run.dir", "x", ["without hydra.run.dir"]),
        ("engine@twin=gpipe", "engine@twin", "gpipe", ["without engine@twin"]),
        ("=3", "=3", None, []),
        ("seed=${nope}", "seed", None, []),
        ("batch.size=0", "batch.size", 0, ["batch.size=8"]),
        ("batch.micro_batches=-2", "batch.micro_batches", -2, ["batch.micro_batches=1"]),
        ("mesh.tensor=0", "mesh.tensor", 0, ["mesh.tensor=1"]),
        ("steps=0", "steps", 0, ["steps=1"]),
        ("warmup=-1", "warmup", -1, ["warmup=0"]),
        (f"warmup={10**400}", "warmup", 10**400, ["warmup=2"]),
        (f"profile={'x' * 300}", "profile", "x" * 300, ["without profile"]),
        ("seed=9223372036854775808", "seed", 2**63, ["seed=0"]),
        ("optimizer.lr=0", "optimizer.lr", 0.0, ["optimizer.lr=0.1"]),
        ("optimizer.lr=-inf", "optimizer.lr", float("-inf"), ["optimizer.lr=0.1"]),
        ("launch.profiler=[1,99]", "launch.profiler", [1, 99], ["launch.profiler=[1]"]),
        ("launch.timeout_s=inf", "launch.timeout_s", float("inf"), ["launch.timeout_s=300"]),
        ("mode=plam", "mode", "plam", ["mode=plan"]),
        ("optimizer.name=adamv", "optimizer.name", "adamv", ["optimizer.name=adam"]),
        (
            "optimizer.beta1=0.9",
            "optimizer.beta1",
            0.9,
            ["optimizer.momentum=0.9 optimizer.beta1=null", "optimizer.beta1=null"],
        ),
        ("optimizer.nesterov=true", "optimizer.nesterov", True, ["optimizer.nesterov=false", "optimizer.momentum=0.9"]),
        ("costs=analitic", "costs", "analitic", ["costs=analytic"]),
        ("mode=sim", "mode", "sim", ["mode=simulate"]),
        ("mode=xyz", "mode", "xyz", ["mode=run"]),
        ("jitter=-0.1", "jitter", -0.1, ["jitter=0.05"]),
        ("jitter=1.5", "jitter", 1.5, ["jitter=0.05"]),
        ("jitter=inf", "jitter", float("inf"), ["jitter=0.05"]),
        ("profile=nowhere.json", "profile", "nowhere.json", ["without profile"]),
        ("model.convs=0", "model.convs", 0, ["model.convs=1"]),
    ],
)
def test_one_mistake(override: str, key: str, value: Any, fixes: list[str]) -> None:
    assert rows(problems(override)) == [(key, value, fixes)]


def test_momentum_is_sgds() -> None:
    """Others have a decay of their mean in its place."""
    adam, muon = ["optimizer.momentum=0.9", "optimizer.name=adam"], ["optimizer.name=muon", "optimizer.beta1=0.9"]
    assert rows(problems(*adam)) == [
        ("optimizer.momentum", 0.9, ["optimizer.beta1=0.9 optimizer.momentum=0", "optimizer.momentum=0"])
    ]
    assert rows(problems(*muon, "optimizer.momentum=0.9")) == [("optimizer.momentum", 0.9, ["optimizer.momentum=0"])]
    compose(muon)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("xyzzy=3", "python run.py --help all lists every key"),
        ("batch.sise=x", "batch.size=..."),
        ("batch=3", "batch.size=..."),
        ("batch={sise: 3}", "batch.size=..."),
        ("+sweeps=smoke", "python run.py -m +sweeps=smoke"),
        ("help", "python run.py --help"),
        ("gpipe", "engine=gpipe"),
        ("deepspeed", "engine=deepspeed or planner=deepspeed"),
        ("steps", "steps=..."),
        ("batch.size=1,2", "python run.py -m batch.size=1,2, or batch.size=[...] for a list"),
    ],
)
def test_advice_that_no_override_can_carry(override: str, hint: str) -> None:
    assert [problem.hint for problem in problems(override)] == [hint]


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        (["model.overrides={layers: 2, rope: {type: linear}}"], {"layers": 2, "rope": {"type": "linear"}}),
        (["model.overrides={layers: 2}", "model.overrides.layers=3"], {"layers": 3}),
        (["model.overrides.rope.type=linear"], {"rope": {"type": "linear"}}),
    ],
)
def test_a_dictionary_takes_any_name(typed: list[str], value: dict[str, Any]) -> None:
    """Also for the next one: compositions are kept."""
    assert compose(["model=hf", "model.config=gpt2_small", *typed]).model.overrides == value
    assert compose(["model=hf", "model.config=gpt2_small"]).model.overrides == {}
    [problem] = problems("model=hf", "model.config=gpt2_small", "model.overides.layers=3")
    assert problem.key == "model.overides.layers"


def test_a_dictionary_takes_no_number() -> None:
    [problem] = problems("model=hf", "model.config=gpt2_small", "model.overrides=3")
    assert (problem.key, problem.message) == ("model.overrides", "is not a dictionary")


def test_a_dictionary_under_a_name_that_is_no_key() -> None:
    [problem] = problems("model=hf", "model.config=gpt2_small", "model.overides={layers: 3}")
    assert problem.key == "model.overides" and problem.hint == "model.overrides=..."


def test_an_infinite_number_and_none_are_not_finite() -> None:
    (problem,) = problems("optimizer.lr=nan")
    assert problem.key == "optimizer.lr" and math.isnan(problem.value)


@pytest.mark.parametrize("override", ["steps", "steps=[1", "engine={a", "a b=3"])
def test_what_cannot_be_read(override: str) -> None:
    (problem,) = problems(override)
    assert problem.key == override
    assert problem.message.startswith("cannot be read: ")


def test_a_key_that_is_typed_twice_in_a_wrong_form_is_two_mistakes() -> None:
    found = problems("+steps=3", "~steps", "+engine=gpipe", "engine.checkpoint=x", "engine@twin=gpipe")
    assert keys(found) == ["~steps", "+engine", "engine@twin", "+steps"]


def test_all_mistakes_at_once() -> None:
    found = problems("engine=gpip", "engine.anything=1", "batch.size=x", "steps=0", "modle=unet", "k=[", "seed=3")
    assert keys(found) == ["engine", "k=[", "batch.size", "modle", "steps"]


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ("steps=0 cluster.devices=0", ["steps", "cluster.devices"]),
        ("optimizer.lr=-1 batch.micro_batches=32", ["optimizer.lr", "batch.micro_batches"]),
        ("tracker=wandb tracker.mode=bad steps=0", ["steps", "tracker.mode"]),
        ("planner.by=x tracker=wandb tracker.mode=bad", ["planner.by", "tracker.mode"]),
        ("batch.size=-5 batch.micro_batches=2", ["batch.size"]),
        ("batch.micro_batches=0 mesh.tensor=2", ["batch.micro_batches", "mesh.tensor"]),
        ("mesh.data=-1 mesh.pipeline=0", ["mesh.data", "mesh.pipeline"]),
        ("precision.dtype=x", ["precision.dtype"]),
        ("engine.checkpoint=x cluster.devices=1 mesh.pipeline=9", ["engine.checkpoint", "mesh.pipeline"]),
        ("mode=profile jitter=-1 batch.micro_batches=5", ["jitter", "batch.micro_batches"]),
        ("mode=profile steps=0 mesh.tensor=2", ["steps"]),
        ("batch.size=x batch.micro_batches=32", ["batch.size"]),
        ("steps=0 planner=given planner.balance=[1,1] mesh.pipeline=99", ["steps", "mesh.pipeline"]),
        ("planner=given planner.balance=[1,1] mesh.pipeline=1 engine.checkpoint=x", ["engine.checkpoint"]),
    ],
)
def test_a_value_out_of_range_does_not_hide_what_cluster_and_engine_refuse(overrides: str, found: list[str]) -> None:
    assert keys(problems(*overrides.split())) == found


def test_the_batch_of_a_stored_profile_is_no_problem(tmp_path: Path) -> None:
    ModelProfile((LayerProfile(),) * 4, model="unet", micro_batch=2).save(tmp_path / "p.json")
    found = problems("steps=0", "batch.micro_batches=64", quoted("profile", str(tmp_path / "p.json")))
    assert keys(found) == ["steps"]


def test_title_is_what_was_typed() -> None:
    with pytest.raises(CannotRun, match=r"^engine=single steps=0 cannot run:\n"):
        compose(["engine=single", "steps=0"])


@given(st.text(st.characters(blacklist_categories=("Cs", "Cc"))))
def test_quoted_keeps_any_text(text: str) -> None:
    assert OverridesParser.create().parse_override(quoted("out", text)).value() == text


KEYS = list(leaves(compose([])))


@given(st.sampled_from([key for key in KEYS if len(key.rpartition(".")[2]) > 5]), st.data())
def test_a_key_without_one_letter_is_found(key: str, data: st.DataObject) -> None:
    start = key.rfind(".") + 1
    gone = data.draw(st.integers(start, len(key) - 1))
    typed = key[:gone] + key[gone + 1 :]
    assume(typed not in KEYS)
    lost = (other for other in KEYS for k in range(len(other)) if other[:k] + other[k + 1 :] == typed)
    assume(set(lost) == {key})  # cluster.peak_tflops.float6 may be float16 or float64
    found = closest_key(typed, KEYS)
    assert found.rpartition(".")[2] == key.rpartition(".")[2]


def test_a_key_that_is_cut_short_is_found() -> None:
    assert closest_key("mesh.pipe", KEYS) == "mesh.pipeline"
    assert closest_key("batch.micro", KEYS) == "batch.micro_batches"
    assert closest_key("mesh.zz", KEYS) == closest_key("mesh.o", KEYS) == ""


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("engine.threads=1", "engine=single has it"),
        ("engine.head=2", "its keys are checkpoint, dependency, streams, portals, deferred_batch_norm"),
        ("cluster.headz=3", ALL_KEYS),
        ("batch.treads=1", "its keys are size, micro_batches, micro_batch_size"),
        ("optimizer.chekpoint_every=1", "its keys are lr, momentum, weight_decay, nesterov, beta1, fused"),
        ("mesh.name=1", "its keys are data, pipeline, tensor"),
        ("model.lr=1", "optimizer.lr=1"),
        ("modl.head=4", "model.heads=4"),
        ("threds.heads=4", "model.heads=4"),
        ("optimiser.lr=1", "optimizer.lr=1"),
        ("launch.steps=3", "steps=3"),
        ("cluster.effective.speed=1", ALL_KEYS),
        ("cluster.effective.node_bandwidt_gb_s=1", "cluster.effective.node_bandwidth_gb_s=1"),
        ("hiden=4", "model.hidden=4"),
        ("model.batch=8", f"batch.KEY=..., {ALL_KEYS}"),
        ("bach=8", f"batch.KEY=..., {ALL_KEYS}"),
    ],
)
def test_a_suggestion_is_no_key_of_another_group_unless_it_is_spelled_so(typed: str, meant: str) -> None:
    (problem,) = problems("engine=gpipe", "model=gpt", typed)
    assert advice(problem).partition(" without ")[0] == meant


LIST = "is not a list, each a whole number"


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (["model=mlp", "model.widths=${mode}"], "model.widths", LIST),
        (["model=mlp", "model.widths=${oc.env:HOME}"], "model.widths", LIST),
        (["model=mlp", "model.widths=${batch}"], "model.widths", LIST),
        (["model=mlp", 'model.widths=${oc.decode:"[8,x]"}'], "model.widths", LIST),
        (["model=mlp", "model.widths=[8,${mode}]"], "model.widths[1]", "has one of another type"),
        (["model=resnet", "model.blocks=${oc.env:HOME}"], "model.blocks", LIST),
        (["engine=gpipe", "mesh.pipeline=2", "planner=given", "planner.balance=${mode}"], "planner.balance", LIST),
        (["batch.size=${mode}"], "batch.size", "has one of another type"),
        (["batch={size: ${mode}}"], "batch.size", "has one of another type"),
        (["batch=${optimizer}"], "batch", "is a group of keys"),
    ],
)
def test_the_value_of_another_key_has_the_type_of_this_one(overrides: list[str], key: str, message: str) -> None:
    (problem,) = problems(*overrides)
    assert problem.key == key and message in problem.message


def test_a_list_may_be_that_of_another_key() -> None:
    given = ["engine=gpipe", "mesh.pipeline=2", "planner=given", "model=mlp", "model.widths=[2,3]"]
    assert compose([*given, "planner.balance=${model.widths}"]).planner.balance == [2, 3]


@pytest.mark.parametrize("typed", ["abc", "{a:1}", "3", "[1,x]"])
def test_what_is_no_list_is_one_problem(typed: str) -> None:
    (problem,) = problems("engine=gpipe", "mesh.pipeline=2", "planner=given", f"planner.balance={typed}")
    assert (problem.key, problem.value, problem.message) == ("planner.balance", typed, LIST)
    assert advice(problem) == "planner.balance=[...]"
    (problem,) = problems("model=mlp", f"model.widths={typed}")
    assert problem.message == LIST and compose(apply(["model=mlp"], problem.fixes[0])).model.widths


@pytest.mark.timeout(20)
@pytest.mark.parametrize("engine", ["single", "torch_pipelining"])
@pytest.mark.parametrize("number", [10**12, 2**63 - 1, 10**30])
@pytest.mark.parametrize("key", ["batch.size", "batch.micro_batches"])
def test_a_number_that_no_run_has_is_refused_at_once(key: str, number: int, engine: str) -> None:
    """Whatever the checks compute with it."""
    assert key in keys(problems(f"engine={engine}", f"{key}={number}", "mode=plan", "cluster=p40x8"))


@pytest.mark.parametrize(
    ("typed", "transport"),
    [
        ([], "torch"),
        (["engine.transport=mpi"], "mpi"),
        (["cluster.device=cpu"], "mpi"),
        (["mode=simulate", "cluster=summit"], "mpi"),
    ],
    ids=" ".join,
)
def test_keys_of_an_engine_on_gpus(typed: list[str], transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages between GPUs of this machine go by NCCL, unless the user says otherwise; the record says by what."""
    monkeypatch.setattr(devices, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(devices, "_gpus", lambda: [devices._Gpu("a GPU", 80)] * 2)
    assert compose(["engine=myelin", *typed]).engine.transport == transport
    monkeypatch.setattr(devices, "_gpus", lambda: [])
    assert compose(["engine=myelin"]).engine.transport == "mpi"


def test_types_in_words() -> None:
    assert described(int | None) == "a whole number or null"
    assert described(list[float]) == "a list, each a number"


def test_choices_are_those_that_hydra_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "mine.yaml").write_text("defaults: [gpipe, _self_]\n")
    monkeypatch.setenv(registry.FURTHER, str(tmp_path))
    with session() as loader:
        for group in registry.GROUPS:
            known = [name for name in loader.get_group_options(group) if not name.startswith("_")]
            assert choices(loader, group) == known
        assert "mine" in choices(loader, "engine")
