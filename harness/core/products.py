"""The matmuls of a layer's forward pass, and what they read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Product:
    """One matmul of a layer's forward pass: for each sample and each of `heads`, one of these.

                     in_                 out                  out
                 +---------+         +---------+          +---------+
      rows per   |  input  |   in_   | weight  |    =     | output  |
      sample     +---------+         |         |          +---------+
                                     +---------+

    | kind      | rows_per_sample  | in_                             | out                     | heads             |
    |-----------|------------------|---------------------------------|-------------------------|-------------------|
    | linear    | tokens, or 1     | features                        | features                | 1                 |
    | conv      | output positions | input channels / groups x kernel| output channels / groups| groups            |
    | attention | queries          | of a head ("scores"), or keys   | keys, or of a head      | heads of attention|
    | embedding | tokens           | vocabulary                      | width                   | 1                 |

    * A linear matmul may have one weight for each of `heads`, as experts do. A transposed convolution is the matmul
      before its outputs are added up: its rows are input positions, its `out` is output channels / groups x kernel.
    * Attention is two matmuls without weights, "scores" and "values"; a causal one counts whole. Any other matmul of
      two activations is of kind "attention", too: each matrix of a batch is a head of its sample.
    * A matmul whose rows do not depend on the samples, as one of two weights, is of kind "once": it runs once for the
      whole micro-batch, and `rows_per_sample` are all its rows.

    `name` is the path of the submodule in the layer that has the weight ("": the layer itself), or else the role
    ("scores"). `weight_bytes`
    are the bytes of that parameter, whatever the matmul casts it to; 0 without one. `frozen`: it is not trained.
    `image` is the shape of a convolution's input for a sample, (input channels, *sides); it is () for a transposed one,
    for one that takes several images of a sample, and where it is unknown.
    """

    name: str
    kind: str = "linear"
    rows_per_sample: int = 1
    in_: int = 1
    out: int = 1
    weight_bytes: int = 0
    heads: int = 1
    image: tuple[int, ...] = ()
    frozen: bool = False

    def flops(self, samples: int) -> int:
        """Returns the FLOPs of the forward pass of a micro-batch of `samples`; a look-up has none."""
        times = {"embedding": 0, "once": 1}.get(self.kind, samples)
        return 2 * times * self.heads * self.rows_per_sample * self.in_ * self.out


INPUT = -1
"""The source of columns that is the layer's input."""


@dataclass(frozen=True)
class Read:
    """The columns (features) of a tensor: of what a product reads, or of a layer's output.

    `sources` are the products of the layer, by index, whose output's columns they are, one by one and in this order;
    INPUT is the layer's input. There are several where outputs were added or multiplied, none where columns were mixed,
    reordered or left out, so that a product cannot be split as what it reads. Of attention they are the products that
    its queries, keys and values come from, whose heads can be split into `heads` parts. `first` is the first product of
    the layer that reads this very tensor.
    """

    sources: tuple[int, ...] = ()
    first: int = 0
    heads: int = 0
