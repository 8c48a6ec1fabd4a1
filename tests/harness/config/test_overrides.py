"""The run in the user's own words."""

import pytest

from harness.cli.compose import compose
from harness.config.overrides import choices, given, title


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


def test_given() -> None:
    assert given(["model=unet"], "model") and given(["model.size=64"], "model")
    assert not given(["mode=run", "planner.model=x"], "model")
