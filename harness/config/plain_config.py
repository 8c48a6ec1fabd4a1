"""A configuration in plain Python objects, of which checks read many keys of very many candidates.

config.mesh.data     OmegaConf looks for types, flags and interpolations: 6 us      here: 0.3 us
"""

from __future__ import annotations

from typing import Any, cast

from omegaconf import DictConfig, OmegaConf


class PlainConfig(dict[str, Any]):
    """A group of keys, which are attributes, too. A value is set as it is: nothing checks its type."""

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(f"no key {key}") from None

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value


def plain(config: DictConfig) -> DictConfig:
    """Return a copy for code that reads keys, and calls nothing of OmegaConf's; the configuration itself where a value
    follows from another key, which may change."""
    values = OmegaConf.to_container(config)
    return config if "${" in str(values) else cast(DictConfig, _grouped(values))


def _grouped(value: Any) -> Any:
    if isinstance(value, dict):
        return PlainConfig({key: _grouped(one) for key, one in value.items()})
    return [_grouped(one) for one in value] if isinstance(value, list) else value


def composed(config: DictConfig) -> DictConfig:
    """Return what OmegaConf reads: a configuration as it is, a plain one as one again."""
    return cast(DictConfig, OmegaConf.create(_ungrouped(config))) if isinstance(config, PlainConfig) else config


def _ungrouped(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _ungrouped(one) for key, one in value.items()}
    return [_ungrouped(one) for one in value] if isinstance(value, list) else value
