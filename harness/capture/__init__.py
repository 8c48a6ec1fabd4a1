"""Any module as a chain of layers: docs/explanation/capture.md. Imports torch.

split     traces the module on tensors without memory, cuts the trace, makes a layer of each part
whole     the module as one layer, for what cannot be split
verify    whether a chain computes what its module computes, in float64
names     the name in the module of each weight of a chain
"""

from harness.capture.layers import names
from harness.capture.split import split, whole
from harness.capture.structure import flat
from harness.capture.verify import verify

__all__ = ["flat", "names", "split", "verify", "whole"]
