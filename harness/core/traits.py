"""What a layer does that some engines cannot run; `harness.checks.layer_traits` judges plans by it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Given:
    """A tensor that a layer gives to the next one: its dtype ("complex64"), and whether it gets a gradient."""

    dtype: str
    gradient: bool


@dataclass(frozen=True)
class Traits:
    """What one layer does, as one forward pass has shown it. Names of weights are those in the whole model.

    `uses` are weights and modules of other layers that it uses and does not hold. `changes` are weights that its
    forward pass changes in place. `in_place` is the layer that made tensors which share memory, if this layer changes
    one of them in place. `max_norm`: it has an embedding that scales rows of its weight. `sparse` are weights whose
    gradients are sparse, `scalars` those without a dimension, `empty` those without elements that get a gradient,
    `unused` those that get none. `draws`: it takes random numbers of Python or NumPy. `whole_draws`: it takes those of
    torch in another way than by dropout modules that are given the samples first, each called once: a part of a
    micro-batch cannot have its part of them. `too_large`: the attribute that leads to more objects than a recomputation
    looks at ("'table' of Lookup"). `complex` are weights of complex numbers, `integers` those of whole numbers,
    `strided` those that are not contiguous in memory.
    """

    gives: tuple[Given, ...] = ()
    uses: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    in_place: int | None = None
    max_norm: bool = False
    sparse: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    draws: bool = False
    whole_draws: bool = False
    too_large: str | None = None
    complex: tuple[str, ...] = ()
    integers: tuple[str, ...] = ()
    strided: tuple[str, ...] = ()
