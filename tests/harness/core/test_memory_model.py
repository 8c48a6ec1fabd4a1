"""Bytes of model state, in the accounts of the papers."""

from __future__ import annotations

import pytest

from harness.core.memory_model import NAMED, MemoryModel, named
from harness.core.model_profile import LayerProfile, ModelProfile

HIDDEN, VOCABULARY, SEQUENCE, BLOCKS = 4512, 51200, 512, 48
GPT_12B = 11_962_440_000
BSIZE = 16_000_000


def gpt_12b() -> ModelProfile:
    """Embedding, blocks, final norm; the head is the embedding's. Parameters of two bytes each."""
    h = HIDDEN
    sizes = [VOCABULARY * h + SEQUENCE * h, *[12 * h * h + 13 * h] * BLOCKS, 2 * h]
    return ModelProfile(tuple(LayerProfile(f"l{n}", param_bytes=2 * size) for n, size in enumerate(sizes)), "gpt_12b",
                        dtype="float16")  # fmt: skip


def test_the_largest_model_has_as_many_parameters_as_printed() -> None:
    assert gpt_12b().parameter_bytes(0, BLOCKS + 1) == 2 * GPT_12B


def test_twenty_bytes_a_parameter() -> None:
    """theta32 and grad32 4 each, theta16 and grad16 2 each, two moments 8 (Myelin, section V-B)."""
    parts = NAMED["adam_mixed"].state_parts(gpt_12b(), range(BLOCKS + 2))
    assert parts == {
        "weights": 2 * GPT_12B,
        "gradients": 2 * GPT_12B,
        "optimizer": 16 * GPT_12B,
        "buffers": 0,
    }
    assert sum(parts.values()) == 20 * GPT_12B


@pytest.mark.parametrize("first", range(0, BLOCKS, BLOCKS // 6))
def test_with_offloading_four_and_the_buckets(first: int) -> None:
    """phi parameters on each of 6 stages: (4 + 16 bsize / phi) phi bytes."""
    layers = range(first, first + BLOCKS // 6)
    phi = gpt_12b().parameter_bytes_of(layers) // 2
    offload = NAMED["myelin_offload"]
    assert sum(offload.state_parts(gpt_12b(), layers).values()) == 4 * phi + 16 * BSIZE
    assert offload.state_bytes(gpt_12b(), layers[0], layers[-1]) == 4 * phi, "of the layers: others may be added"
    assert round(2 * phi * offload.offloaded) == 12 * phi, "in the host's memory"


def test_the_whole_model_as_in_the_paper() -> None:
    """Copies of the model in 2 and in 8 replicas on 48 devices: 478.5 GB become 108 (section V-B)."""
    without = 2 * sum(NAMED["adam_mixed"].state_parts(gpt_12b(), range(BLOCKS + 2)).values())
    offload = NAMED["myelin_offload"]
    state = offload.state_bytes(gpt_12b(), 0, BLOCKS + 1)
    assert without / 1e9 == pytest.approx(478.5, abs=0.05)
    assert (2 * state + 48 * offload.buckets_bytes) / 1e9 == pytest.approx(108.0, abs=0.05)


def test_models_by_their_names() -> None:
    assert {name: named("auto", name).name for name in ("sgd", "adam", "adamw")} == {
        "sgd": "sgd_fp32", "adam": "adam_fp32", "adamw": "adam_fp32",
    }  # fmt: skip
    assert named("auto", "sgd", 0.9).name == "sgd_momentum_fp32"
    assert named("myelin_offload").buckets_bytes == 256_000_000
    with pytest.raises(KeyError):
        named("none")


@pytest.mark.parametrize(("device", "available"), [(100, 91), (9, 0), (5, 0)])
def test_what_is_kept_free_is_not_available(device: int, available: int) -> None:
    assert MemoryModel(reserve_bytes=9).available_bytes(device) == available
