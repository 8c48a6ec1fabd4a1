"""One complete configuration, or all that is wrong with the overrides, in the user's own keys."""

import re
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import assume, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from harness import registry
from harness.compose import CONF, GROUPS, compose
from harness.overrides import described, leaves, quoted, suggestion
from harness.problem import CannotRun, Problem
from harness.profile import LayerProfile, ModelProfile

FILES = sorted(path for group in GROUPS for path in (CONF / group).glob("*.yaml"))
ENGINES = ", ".join(sorted(plugin.name for plugin in registry.scan() if plugin.group == "engine"))


def problems(*overrides: str) -> list[Problem]:
    with pytest.raises(CannotRun) as caught:
        compose(overrides)
    return list(caught.value.problems)


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


def test_one_composition_leaves_nothing_behind_for_the_next() -> None:
    default = compose([])
    compose(["batch.size=3", "engine.streams=false", "steps=${batch.size}"])
    problems("batch.micro_batches=5", "batch={size: 7, sise: 3}")
    assert compose([]) == default


def test_the_last_of_two_counts() -> None:
    config = compose(["steps=3", "engine=gpipe", "steps=4", "engine=single"])
    assert (config.steps, config.engine.name) == (4, "single")


def test_interpolations_are_resolved() -> None:
    config = compose(["batch.micro_batches=${batch.size}", "batch.size=32"])
    assert OmegaConf.to_container(config, resolve=False)["batch"] == {"size": 32, "micro_batches": 32}  # type: ignore[index, call-overload]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_every_choice_composes_and_says_how_to_use_it(path: Path) -> None:
    command = re.match(r"(?:#.*\n)*?#.* python run\.py ((?:\S+=\S+ ?)+)", path.read_text())
    assert command, "begins with a comment that has a command"
    typed = command[1].split()
    assert f"{path.parent.name}={path.stem}" in typed
    compose(typed)
    schema, own, *_ = OmegaConf.load(path).defaults
    assert (schema[0], own) == ("_", "_self_")


@pytest.mark.parametrize(
    ("override", "key", "what", "mend"),
    [
        ("engine=gpip", "engine gpip", f"is not one of {ENGINES}", "engine=gpipe"),
        ("engine=[gpipe]", "engine [gpipe]", f"is not one of {ENGINES}", "engine=gpipe"),
        ("engine=_gpipe", "engine _gpipe", f"is not one of {ENGINES}", "engine=gpipe"),
        *[
            (f"precision={name}", f"precision {name}", "is not one of bf16, fp16, fp32, fp64", f"precision={mend}")
            for name, mend in (("float16", "fp16"), ("float32", "fp32"), ("float64", "fp64"), ("bfloat16", "bf16"))
        ],
        ("engine=null", "engine null", f"is not one of {ENGINES}", ""),
        ("engine.name=single", "engine.name single", "follows from engine=...", "engine=single"),
        ("batch.sise=3", "batch.sise", "is not a key of batch", "batch.size=..."),
        ("bach.size=3", "bach.size", "is not a key", "batch.size=..."),
        ("micro_batches=3", "micro_batches", "is not a key", "batch.micro_batches=..."),
        ("engine.checkpoints=never", "engine.checkpoints", "is not a key of engine", "engine.checkpoint=..."),
        ("steps.x=3", "steps.x", "is not a key of steps", "python run.py --help lists every key"),
        ("xyzzy=3", "xyzzy", "is not a key", "python run.py --help lists every key"),
        ("batch.size=abc", "batch.size abc", "is not a whole number", "batch.size=16"),
        ("batch.size=2.5", "batch.size 2.5", "is not a whole number", "batch.size=16"),
        ("batch.size=true", "batch.size True", "is not a whole number", "batch.size=16"),
        ("batch.size=", "batch.size", "is not a whole number", "batch.size=16"),
        ("batch.size=null", "batch.size null", "is not a whole number", "batch.size=16"),
        ("mesh.pipeline=two", "mesh.pipeline two", "is not a whole number or null", "mesh.pipeline=null"),
        ("optimizer.lr=big", "optimizer.lr big", "is not a number", "optimizer.lr=0.1"),
        ("engine.streams=3", "engine.streams 3", "is not true or false", "engine.streams=true"),
        ("engine.streams=maybe", "engine.streams maybe", "is not true or false", "engine.streams=true"),
        ("batch=3", "batch 3", "is a group of keys: batch.size, batch.micro_batches", "batch.size=..."),
        ("batch={sise: 3}", "batch.sise", "is not a key", "batch.size=..."),
        ("+xyzzy=3", "+xyzzy", "is not a key", "python run.py --help lists every key"),
        ("+steps=3", "+steps", "is a key already", "steps=3"),
        ("++steps=3", "++steps", "is a key already", "steps=3"),
        ("++engine.new=3", "++engine.new", "is not a key of engine", "python run.py --help lists every key"),
        ("+engine=gpipe", "+engine gpipe", "has its place already", "engine=gpipe"),
        ("~steps", "~steps", "takes a key away, every run needs all of them", ""),
        ("+sweeps=smoke", "+sweeps=smoke", "is a sweep, not one run", "python run.py -m +sweeps=smoke"),
        ("hydra.run.dir=x", "hydra.run.dir=x", "configures Hydra's own launcher, which is not used here", ""),
        ("engine@twin=gpipe", "engine@twin=gpipe", "moves a group to another key, which is not possible here", ""),
        ("=3", "=3", "has no key before =", ""),
        ("seed=${nope}", "seed", "Interpolation key 'nope' not found", ""),
        ("batch.size=0", "batch.size 0", "must be at least 1", "batch.size=1"),
        ("batch.micro_batches=-2", "batch.micro_batches -2", "must be at least 1", "batch.micro_batches=1"),
        ("mesh.tensor=0", "mesh.tensor 0", "must be at least 1", "mesh.tensor=1"),
        ("steps=0", "steps 0", "must be at least 1", "steps=1"),
        ("warmup=-1", "warmup -1", "must be at least 0", "warmup=0"),
        ("seed=9223372036854775808", "seed 9223372036854775808", f"must be at most {2**63 - 1}", "seed=0"),
        ("optimizer.lr=0", "optimizer.lr 0.0", "must be above 0", "optimizer.lr=0.1"),
        ("optimizer.lr=nan", "optimizer.lr nan", "must be finite", "optimizer.lr=0.1"),
        ("launch.timeout_s=inf", "launch.timeout_s inf", "must be finite", "launch.timeout_s=300.0"),
        ("mode=plam", "mode plam", "is not one of run, plan, simulate, profile, calibrate, tune", "mode=plan"),
        ("optimizer.name=adamv", "optimizer.name adamv", "is not one of sgd, adam, adamw", "optimizer.name=adam"),
        ("costs=analitic", "costs analitic", "is not one of auto, measured, scaled, analytic, none", "costs=analytic"),
        ("mode=sim", "mode sim", "is not one of run, plan, simulate, profile, calibrate, tune", "mode=simulate"),
        ("mode=xyz", "mode xyz", "is not one of run, plan, simulate, profile, calibrate, tune", "mode=run"),
        ("jitter=-0.1", "jitter -0.1", "is a relative spread, from 0 to 1", "jitter=0.05"),
        ("jitter=1.5", "jitter 1.5", "is a relative spread, from 0 to 1", "jitter=0.05"),
        ("jitter=inf", "jitter inf", "must be finite", "jitter=0.05"),
        ("profile=nowhere.json", "profile nowhere.json", "is not a file", ""),
        ("model.convs=0", "model.convs 0", "must be at least 1", "model.convs=1"),
    ],
)
def test_one_mistake(override: str, key: str, what: str, mend: str) -> None:
    assert problems(override) == [Problem(key, what, mend)]


@pytest.mark.parametrize("override", ["steps", "steps=[1", "engine={a", "a b=3"])
def test_what_cannot_be_read(override: str) -> None:
    (problem,) = problems(override)
    assert problem.key == override
    assert problem.what.startswith("cannot be read: ")


def test_several_values_need_a_sweep() -> None:
    (problem,) = problems("batch.size=1,2")
    assert problem.mend.startswith("python run.py -m batch.size=1,2")


def test_all_mistakes_at_once() -> None:
    found = problems("engine=gpip", "engine.anything=1", "batch.size=x", "steps=0", "modle=unet", "k=[", "seed=3")
    assert [problem.key for problem in found] == ["engine gpip", "k=[", "batch.size x", "modle", "steps 0"]


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ("steps=0 cluster.devices=0", ["steps 0", "cluster.devices 0"]),
        ("optimizer.lr=-1 batch.micro_batches=32", ["optimizer.lr -1.0", "batch.micro_batches 32"]),
        ("tracker=wandb tracker.mode=bad steps=0", ["steps 0", "tracker.mode bad"]),
        ("planner.by=x tracker=wandb tracker.mode=bad", ["planner.by x", "tracker.mode bad"]),
        ("batch.size=-5 batch.micro_batches=2", ["batch.size -5"]),
        ("batch.micro_batches=0 mesh.tensor=2", ["batch.micro_batches 0", "mesh.tensor 2"]),
        ("mesh.data=-1 mesh.pipeline=0", ["mesh.data -1", "mesh.pipeline 0"]),
        ("precision.dtype=x", ["precision.dtype x"]),
        ("engine.checkpoint=x cluster.devices=1 mesh.pipeline=9", ["engine.checkpoint x", "mesh.pipeline 9"]),
        ("mode=profile jitter=-1 batch.micro_batches=5", ["jitter -1.0", "batch.micro_batches 5"]),
        ("mode=profile steps=0 mesh.tensor=2", ["steps 0"]),
        ("batch.size=x batch.micro_batches=32", ["batch.size x"]),
        ("steps=0 planner=given planner.balance=[1,1] mesh.pipeline=99", ["steps 0", "mesh.pipeline 99"]),
        ("planner=given planner.balance=[1,1] mesh.pipeline=1 engine.checkpoint=x", ["engine.checkpoint x"]),
    ],
)
def test_a_value_out_of_range_does_not_hide_what_cluster_and_engine_refuse(overrides: str, keys: list[str]) -> None:
    assert [problem.key for problem in problems(*overrides.split())] == keys


def test_the_batch_of_a_stored_profile_is_no_problem(tmp_path: Path) -> None:
    ModelProfile((LayerProfile(),) * 4, model="unet", micro_batch=2).save(tmp_path / "p.json")
    found = problems("steps=0", "batch.micro_batches=64", quoted("profile", str(tmp_path / "p.json")))
    assert [problem.key for problem in found] == ["steps 0"]


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
    found = suggestion(typed, KEYS).removesuffix("=...")
    assert found.rpartition(".")[2] == key.rpartition(".")[2]


def test_a_key_that_is_cut_short_is_found() -> None:
    assert suggestion("mesh.pipe", KEYS) == "mesh.pipeline=..."
    assert suggestion("batch.micro", KEYS) == "batch.micro_batches=..."
    assert suggestion("mesh.zz", KEYS) == suggestion("mesh.o", KEYS) == "python run.py --help lists every key"


def test_types_in_words() -> None:
    assert described(int | None) == "a whole number or null"
    assert described(list[float]) == "a list, each a number"
