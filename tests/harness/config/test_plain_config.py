from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from harness.cli.compose import compose
from harness.config.plain_config import plain


def test_it_is_read_like_the_configuration() -> None:
    config = compose(["engine=myelin", "model=gpt", "cluster=summit"])
    own = plain(config)
    assert own == OmegaConf.to_container(config)
    assert (own.engine.order, own.engine["order"]) == (config.engine.order,) * 2
    assert own.engine.get("checkpoint", "never") == config.engine.get("checkpoint", "never") == "never"
    with pytest.raises(AttributeError, match="no key zero"):
        own.engine.zero  # noqa: B018


def test_it_is_a_copy() -> None:
    config = compose(["engine=ddp"])
    own = plain(config)
    own.mesh.data, own.batch.micro_batches = 3, 5
    assert (own.mesh.data, own["batch"]["micro_batches"]) == (3, 5)
    assert config.mesh.data is None and config.batch.micro_batches != 5


def test_keys_that_follow_from_others_are_left_to_omegaconf() -> None:
    config = OmegaConf.create({"mesh": {"data": 2}, "batch": {"size": "${mesh.data}"}})
    assert plain(config) is config
