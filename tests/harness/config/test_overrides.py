"""The run in the user's own words."""

import pytest

from harness.cli.compose import compose
from harness.config.overrides import choices, given, title
from harness.core.problem import CannotRun
from tests.problems import refused


def test_presets_keep_their_names() -> None:
    typed = ["model=unet_5_64", "cluster=flat"]
    assert choices(compose(typed), typed) == {"engine": "gpipe", "model": "unet_5_64", "cluster": "flat"}


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ([], "engine=gpipe model=unet"),
        (["engine=single", "cluster=flat"], "engine=single model=unet cluster=flat"),
        (["mode=profile", "cluster=flat"], "model=unet cluster=flat"),
    ],
)
def test_title(typed: list[str], line: str) -> None:
    assert title(compose(typed), typed) == line


def test_a_stored_profile_is_the_model(tmp_path) -> None:
    (tmp_path / "resnet.json").write_text("{}")
    typed = [f"profile={tmp_path / 'resnet.json'}"]
    assert title(compose(typed), typed) == "engine=gpipe model=resnet"


@pytest.mark.parametrize("value", ["runs/Jürgen", "/ünï/ö_1", "実験", "\udcff/r"], ids=ascii)
def test_letters_of_all_languages_need_no_quotes(value: str) -> None:
    assert compose([f"out={value}"]).out == value
    assert compose([f"out='{value}'"]).out == value


@pytest.mark.parametrize("value", ["ssh -o Port=2222 -F /a", "=b", "a=b=c"])
def test_an_equals_sign_in_a_value_needs_no_quotes(value: str) -> None:
    assert compose([f"launch.ssh={value}"]).launch.ssh == compose([f"launch.ssh='{value}'"]).launch.ssh == value


def test_given() -> None:
    assert given(["model=unet"], "model") and given(["model.size=64"], "model")
    assert not given(["mode=run", "planner.model=x"], "model")


@pytest.mark.parametrize(
    ("typed", "has_it"),
    [
        (["engine=single", "engine.zero=1"], "engine=deepspeed has it"),
        (["engine=gpipe", "engine.schedule=1f1b"], "engine=pipeline, torch_pipelining have it"),
        (["model=gpt", "model.blocks=1"], "model=densenet, resnet have it"),
        (["engine=single", "engine.nothing.like_it=1"], "its keys are checkpoint, deferred_batch_norm, threads"),
    ],
)
def test_a_key_of_another_choice_is_found_there(typed: list[str], has_it: str) -> None:
    with pytest.raises(CannotRun) as caught:
        compose(typed)
    assert [(problem.key, problem.hint) for problem in refused(caught)] == [(typed[1].partition("=")[0], has_it)]
