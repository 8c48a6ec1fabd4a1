"""Profiles of networks with matmuls, by hand: what counting the models gives. Clusters for them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from harness.core.cluster import Cluster, Link
from harness.core.model_profile import LayerProfile, ModelProfile, Tied
from harness.core.products import Product

FLOAT = 4


def dense(widths: tuple[int, ...], samples: int = 64, seconds: float = 0.0) -> ModelProfile:
    """Dense layers "linear_0", "linear_1", ... without bias."""
    layers = tuple(
        LayerProfile(
            f"linear_{k}", seconds, 2 * seconds, 2.0 * samples * a * b, 1.0, param_bytes=FLOAT * a * b,
            output_bytes=FLOAT * samples * b, saved_bytes=FLOAT * samples * a,
            products=(Product("linear", "linear", 1, a, b, FLOAT * a * b),),
        )
        for k, (a, b) in enumerate(pairwise(widths))
    )  # fmt: skip
    return ModelProfile(layers, "dense", samples, input_bytes=FLOAT * samples * widths[0], source="by hand")


def transformer(
    layers: int = 2, hidden: int = 64, heads: int = 8, tokens: int = 16, words: int = 256, samples: int = 16
) -> ModelProfile:
    """An embedding, blocks of attention and two dense layers, and a head with the embedding's weight."""
    out = FLOAT * samples * tokens * hidden
    tied = (Tied("embedding.weight", FLOAT * words * hidden),)
    embedding = LayerProfile(
        "embedding", param_bytes=FLOAT * words * hidden, output_bytes=out, saved_bytes=8 * samples * tokens, tied=tied,
        products=(Product("embedding", "embedding", tokens, words, hidden, FLOAT * words * hidden),),
    )  # fmt: skip
    head = LayerProfile(
        "head", param_bytes=FLOAT * words * hidden, output_bytes=FLOAT * samples * tokens * words, saved_bytes=out,
        tied=tied, products=(Product("linear", "linear", tokens, hidden, words, FLOAT * words * hidden),),
    )  # fmt: skip
    blocks = tuple(_block(f"block_{k}", hidden, heads, tokens, out) for k in range(layers))
    whole = (embedding, *blocks, head)
    return ModelProfile(whole, "transformer", samples, input_bytes=8 * samples * tokens, source="by hand")


def _block(name: str, hidden: int, heads: int, tokens: int, out: int) -> LayerProfile:
    sizes = (("attention.qkv", hidden, 3 * hidden), ("attention.projection", hidden, hidden),
             ("mlp.up", hidden, 4 * hidden), ("mlp.down", 4 * hidden, hidden))  # fmt: skip
    qkv, projection, up, down = (Product(n, "linear", tokens, a, b, FLOAT * a * b) for n, a, b in sizes)
    scores = Product("scores", "attention", tokens, hidden // heads, tokens, heads=heads)
    values = Product("values", "attention", tokens, tokens, hidden // heads, heads=heads)
    weights = sum(FLOAT * a * b for _, a, b in sizes)
    return LayerProfile(
        name, param_bytes=weights, output_bytes=out, saved_bytes=10 * out,
        products=(qkv, scores, values, projection, up, down),
    )  # fmt: skip


def clusters() -> st.SearchStrategy[Cluster]:
    """A few nodes of a few devices; links inside of nodes are slower than the port, as fast, or faster."""
    shapes = st.sampled_from([(2, 2), (2, 4), (2, 8), (4, 2), (4, 4), (8, 2), (3, 4), (2, 3), (2, 6), (6, 2), (8, 1)])
    links = st.builds(Link, st.sampled_from([0.0, 1e-6, 1e-4]), st.sampled_from([0.0, 1e-12, 1e-10, 1e-9, 1e-8]))
    return st.builds(
        lambda shape, intra, port: Cluster(nodes=shape[0], devices_per_node=shape[1], intra=intra, node_port=port),
        shapes, links, links,
    )  # fmt: skip
