"""What a profile adds up: shared parameters once, FLOPs of products; and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.model_profile import LayerProfile, ModelProfile, Skip, Tied
from harness.core.products import Product
from harness.core.serialization import SchemaError

SIZES = {"a": 100, "b": 30, "c": 7, "d": 1}


def layer(shared: str, own: int = 0) -> LayerProfile:
    """A layer with the parameters `shared` of SIZES, and `own` bytes that no other has."""
    tied = tuple(Tied(name, SIZES[name]) for name in shared)
    return LayerProfile(param_bytes=sum(t.bytes for t in tied) + own, tied=tied)


def test_a_head_with_a_bias_shares_only_the_embedding():
    profile = ModelProfile((layer("a", own=5), layer("", own=3), layer("a", own=2)))
    assert profile.parameter_bytes(0, 2) == 100 + 5 + 3 + 2
    assert profile.parameter_bytes(1, 2) == 100 + 3 + 2
    assert profile.parameter_bytes_of([0, 2]) == 100 + 5 + 2
    assert profile.parameter_bytes_of([]) == 0


@given(st.lists(st.tuples(st.sets(st.sampled_from("abcd")), st.integers(0, 9)), min_size=1, max_size=6), st.data())
def test_parameters_are_counted_by_their_names(made, data):
    profile = ModelProfile(tuple(layer("".join(sorted(shared)), own) for shared, own in made))
    first = data.draw(st.integers(0, len(made) - 1))
    last = data.draw(st.integers(first, len(made) - 1))
    held = made[first : last + 1]
    names = set().union(*(shared for shared, _ in held))
    assert profile.parameter_bytes(first, last) == sum(SIZES[name] for name in names) + sum(own for _, own in held)


@pytest.mark.parametrize(
    ("tied", "what"),
    [
        ((Tied("a", 6), Tied("b", 5)), "tied of layer 'head' is 11 bytes, its param_bytes are 10"),
        ((Tied("a", 2), Tied("a", 2)), "tied of layer 'head' has 2 names, 1 of them different"),
    ],
)
def test_impossible_ties_are_refused(tied, what):
    with pytest.raises(ValueError, match=what):
        LayerProfile("head", param_bytes=10, tied=tied)
    with pytest.raises(ValueError, match="bytes of the tied 'a' is -1, must be a number of at least 0"):
        Tied("a", -1)


def test_flops_of_products():
    assert Product("p", "linear", 5, 3, 4).flops(2) == 2 * 2 * 5 * 3 * 4
    assert Product("p", "conv", 5, 3, 4, heads=6).flops(2) == 6 * Product("p", "conv", 5, 3, 4).flops(2)
    assert Product("p", "once", 5, 3, 4, heads=6).flops(2) == 2 * 6 * 5 * 3 * 4
    assert Product("p", "embedding", 5, 3, 4).flops(2) == 0


def test_an_older_profile_is_not_taken_for_a_new_one():
    """In schema 1 a tie was one name, and products were left out."""
    with pytest.raises(SchemaError, match="schema: expected 2 for a ModelProfile, got '1'"):
        ModelProfile.from_json({"schema": 1, "layers": [{"name": "a"}]})


@pytest.mark.parametrize(
    ("source", "times"),
    [
        ("measured on A", "measured"),
        ("scaled from A to B: measured on A", "scaled"),
        ("analytic on A from counted work", "analytic"),
        ("none, measured on A", "none"),
        ("counted on the meta device", "none"),
        ("by hand", "as given"),
        (None, "as given"),
    ],
)
def test_a_profile_of_before_says_in_its_source_where_its_times_are_from(source, times):
    stored = ModelProfile((LayerProfile(),)).to_json()
    del stored["times"], stored["source"]
    if source:
        stored["source"] = source
    assert ModelProfile.from_json(stored).times == times
    assert ModelProfile.from_json({**stored, "times": "measured"}).times == "measured", "what is said counts"


def test_a_stored_profile_need_not_say_what_layers_work_with():
    profile = ModelProfile((LayerProfile("l", working_bytes=7),))
    stored = profile.to_json()
    assert ModelProfile.from_json(stored) == profile
    del stored["layers"][0]["working_bytes"]
    assert ModelProfile.from_json(stored).layers[0].working_bytes == 0


def test_a_profile_of_other_micro_batches_has_their_times_and_bytes():
    layer = LayerProfile("l", 4.0, 8.0, param_bytes=100, output_bytes=40, saved_bytes=80, working_bytes=6)
    profile = ModelProfile((layer, layer), micro_batch=4, input_bytes=20, skips=(Skip(0, 1, 12, "s"),))
    half, own = profile.for_samples(2), profile.for_samples(4)
    assert own is profile
    assert (half.micro_batch, half.input_bytes, half.skips[0].bytes) == (2, 10, 6)
    wanted = LayerProfile("l", 2.0, 4.0, param_bytes=100, output_bytes=20, saved_bytes=40, working_bytes=3)
    assert half.layers == (wanted, wanted)
    assert half.for_samples(12).layers[0].output_bytes == 120
