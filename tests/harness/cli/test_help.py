"""The keys of the choices that are typed, and how to get all others."""

import re
import shlex

import pytest

from harness.checks import values
from harness.cli import help
from harness.cli.compose import read
from harness.config import registry
from harness.core.problem import CannotRun


def keys(text: str) -> dict[str, str]:
    """Each key with a dot, and its value."""
    return dict(re.findall(r"^ {4}(\w+\.[\w.]+)=(\S+)", text, re.MULTILINE))


def test_the_keys_of_a_choice_alone() -> None:
    text = help.text(["engine=gpipe", "steps=3"])
    assert {key.partition(".")[0] for key in keys(text)} == {"engine"}
    assert keys(text)["engine.checkpoint"] == "except_last" and "engine.zero" not in text
    others = dict(re.findall(r"^ {4}(\w+)=(\w+)", text, re.MULTILINE))
    assert others == {
        "planner": "balance",
        "model": "unet",
        "data": "synthetic",
        "tracker": "wandb",
        "cluster": "local",
        "precision": "fp32",
    }
    assert "python run.py --help" in text and len(text.splitlines()) < 40


def test_a_preset_has_its_own_values_and_a_planner_its_engine() -> None:
    text = help.text(["model=gpt_12b", "cluster=p40x8", "planner=megatron"])
    assert keys(text)["model.hidden"] == "4512" and keys(text)["cluster.devices"] == "8"
    assert "    engine=sbp " in text


@pytest.mark.usefixtures("at_length")
@pytest.mark.usefixtures("computation")
def test_every_choice_has_help() -> None:
    for group in registry.GROUPS:
        for choice in next(choices for name, choices, _ in help.groups() if name == group):
            assert help.text([f"{group}={choice.name}"]).startswith(f"{group}={choice.name}")


def test_without_a_choice_the_page_is_an_overview() -> None:
    """Of a screen: every mode, every choice of every group, commands that can be run, and how to see keys."""
    text = help.text()
    assert help.text(["steps=3"]) == text and len(text.splitlines()) <= 60 and not keys(text)
    words = {*re.findall(r"[\w=]+", text)}
    for group in registry.GROUPS:
        assert {choice.name for choice in next(choices for name, choices, _ in help.groups() if name == group)} <= {
            word.rpartition("=")[2] for word in words
        }
    assert {f"mode={mode}" for mode in (*values.MODES, *values.SEVERAL)} <= words


@pytest.mark.parametrize("command", help.EXAMPLES.splitlines())
def test_each_example_can_be_composed(command: str) -> None:
    overrides = [word for word in shlex.split(command)[2:] if word != "-m"]
    for text in overrides:
        several = text.startswith("engine=") and ("," in text or text == "engine=all")
        one = "engine=gpipe" if several else text
        assert read([one])
    assert len(help.EXAMPLES.splitlines()) == 5


def test_all_keys_and_those_of_a_group_and_those_that_begin_so() -> None:
    assert {"engine.zero", "batch.size", "planner.balance"} <= {*keys(help.text([help.ALL]))}
    planner = help.text(["planner"])
    assert {key.partition(".")[0] for key in keys(planner)} == {"planner"} and "\n    madpipe " in planner
    assert {*keys(help.text(["mesh"]))} == {"mesh.data", "mesh.pipeline", "mesh.tensor"}
    zero = help.text(["engine.zero", "steps"])
    assert [*keys(zero)] == ["engine.zero"] and "with engine=deepspeed" in zero and "\n    steps=" in zero


@pytest.mark.parametrize(("word", "hint"), [("gpipe", "engine=gpipe --help"), ("engin", "--help all")])
def test_a_word_that_is_no_group_and_no_key(word: str, hint: str) -> None:
    with pytest.raises(CannotRun) as caught:
        help.text([word])
    (problem,) = caught.value.problems
    assert (problem.key, problem.value, problem.hint) == ("--help", word, f"python run.py {hint}")


def test_a_choice_that_does_not_exist() -> None:
    with pytest.raises(CannotRun):
        help.text(["engine=gpip"])
