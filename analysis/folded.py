"""Documents that are much alike as one: what all have in common, once, and of each what differs. Nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Document = dict[str, Any]


def fold(documents: Sequence[Document]) -> tuple[Document, list[Document]]:
    """What all documents share, however deep, and the rest of each.

        {"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}   ->   {"a": {"b": 1}}, [{"a": {"c": 2}}, {"a": {"c": 3}}]

    Lists are shared whole, or not at all.
    """
    common: Document = {}
    rests: list[Document] = [{} for _ in documents]
    for key in dict.fromkeys(key for document in documents for key in document):
        values = [document[key] for document in documents if key in document]
        everywhere = len(values) == len(documents)
        if everywhere and all(isinstance(value, dict) for value in values):
            common[key], parts = fold(values)
            for rest, part in zip(rests, parts, strict=True):
                rest |= {key: part} if part else {}
        elif everywhere and all(_same(value, values[0]) for value in values):
            common[key] = values[0]
        else:
            for rest, document in zip(rests, documents, strict=True):
                rest |= {key: document[key]} if key in document else {}
    return common, rests


def unfold(common: Mapping[str, Any], rest: Mapping[str, Any]) -> Document:
    """A document again, which shares no dictionary with `common`."""
    found: Document = {}
    for key in [*common, *(key for key in rest if key not in common)]:
        if isinstance(common.get(key), dict):
            found[key] = unfold(common[key], rest.get(key, {}))
        else:
            found[key] = rest[key] if key in rest else common[key]
    return found


def _same(value: Any, other: Any) -> bool:
    """To the letter, so that 1, 1.0 and true stay what they are, in lists, too."""
    return json.dumps(value, sort_keys=True) == json.dumps(other, sort_keys=True)
