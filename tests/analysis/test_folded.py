"""Documents as what they share and what differs: nothing is lost."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as some

from analysis.folded import fold, unfold

LEAVES = some.none() | some.booleans() | some.integers(0, 2) | some.sampled_from([0.0, 1.0, "", "a"])
VALUES = some.recursive(
    LEAVES | some.just({}) | some.lists(LEAVES, max_size=2),
    lambda inner: some.dictionaries(some.sampled_from("abc"), inner, max_size=3),
)
DOCUMENTS = some.lists(some.dictionaries(some.sampled_from("abc"), VALUES, max_size=3), max_size=4)


@given(DOCUMENTS)
def test_unfolding_gives_every_document_back(documents: list[dict[str, Any]]) -> None:
    """As JSON, in which 1, 1.0 and true are not the same."""
    common, rests = fold(documents)
    assert len(rests) == len(documents)
    for document, rest in zip(documents, rests, strict=True):
        found = unfold(common, rest)
        assert json.dumps(found, sort_keys=True) == json.dumps(document, sort_keys=True)


def test_what_all_have_is_there_once() -> None:
    documents = [{"a": {"b": 1, "c": [1, 2]}, "d": {}}, {"a": {"b": 1, "c": [1, 3]}, "d": {}, "e": 2}]
    common, rests = fold(documents)
    assert common == {"a": {"b": 1}, "d": {}}
    assert rests == [{"a": {"c": [1, 2]}}, {"a": {"c": [1, 3]}, "e": 2}]


def test_documents_share_no_dictionary() -> None:
    common, rests = fold([{"a": {"b": 1}}] * 2)
    unfold(common, rests[0])["a"]["b"] = 2
    assert unfold(common, rests[1]) == {"a": {"b": 1}}
