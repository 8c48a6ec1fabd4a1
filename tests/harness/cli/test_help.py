"""The keys of the choices that are typed, and how to get all others."""

import re

import pytest

from harness.cli import help
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


def test_without_a_choice_the_page_has_everything() -> None:
    assert help.text(["steps=3"]) == help.text()
    assert {"engine.zero", "batch.size", "planner.balance"} <= {*keys(help.text())}


def test_a_choice_that_does_not_exist() -> None:
    with pytest.raises(CannotRun):
        help.text(["engine=gpip"])
