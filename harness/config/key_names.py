"""Every key of a configuration by its name, and the one that was probably meant by another name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

SHORT = 3
"""Letters of a key that is cut short, at least."""


def closest_key(key: str, known: Sequence[str]) -> str:
    """The known key that was probably meant; "" if none is close.

    The last part counts most (model.chanels, micro_batches), and may be cut short (mesh.pipe); of several keys that end
    similar the most similar one. Of a key in a group only keys of that group are meant (cluster.memory), or the only
    key elsewhere that is spelled like its last part (launch.steps, engine.micro_batches). Before all, one that has the
    same letters (batchsize, batch_size).
    """
    if same := [name for name in known if _letters(name) == _letters(key)]:
        return same[0]
    parent, _, last = key.rpartition(".")
    groups = {name.partition(".")[0] for name in known if "." in name}
    top = parent.partition(".")[0]
    if top not in groups:
        near = difflib.get_close_matches(top, groups, n=1)
        return _closest(key, [name for name in known if not near or name.startswith(f"{near[0]}.")])
    of_parent = [name for name in known if name.rpartition(".")[0] == parent]
    of_group = [name for name in known if name.startswith(f"{top}.")]
    elsewhere = [name for name in known if name.rpartition(".")[2] == last]
    return _closest(key, of_parent) or _closest(key, of_group) or (elsewhere[0] if len(elsewhere) == 1 else "")


def _letters(key: str) -> str:
    return re.sub(r"[._-]", "", key.lower())


def _closest(key: str, known: Sequence[str]) -> str:
    lasts = {name: name.rpartition(".")[2] for name in known}
    last = key.rpartition(".")[2]
    near = difflib.get_close_matches(last, lasts.values(), n=1, cutoff=0.75)
    near = near or [one for one in lasts.values() if len(last) >= SHORT and one.startswith(last)]
    similar = [name for name, last in lasts.items() if last in near]
    return (difflib.get_close_matches(key, similar, n=1, cutoff=0) or [""])[0]


def names(config: DictConfig) -> list[str]:
    """Every key, and the groups: engine, batch, ..."""
    return [*leaves(config), *(str(name) for name, node in config.items() if OmegaConf.is_dict(node))]


def leaves(config: DictConfig) -> Iterator[str]:
    """Every key of a composed configuration, in full: batch.size, ..."""
    return (key for key, _ in with_values(config))


def with_values(config: DictConfig) -> Iterator[tuple[str, Any]]:
    """Every key, and its value before it is resolved."""

    def below(node: dict[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, child in node.items():
            if isinstance(child, dict) and child:
                yield from below(child, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", child

    content = OmegaConf.to_container(config, resolve=False)
    assert isinstance(content, dict)
    return below(content, "")
