"""Any module as a chain of layers: docs/explanation/capture.md. Imports torch.

split             traces the module on tensors without memory, cuts the trace, makes a layer of each part
whole             the module as one layer
split_or_whole    the first, or the second for a module that cannot be split; `unsplit` says why
verify            whether a chain computes what its module computes, in float64
inputs            what a chain takes, of the arguments of its module
names             the name in the module of each weight of a chain
AS_IT_IS          how a module trains that cannot be split
"""

from harness.capture.layers import names, unsplit
from harness.capture.split import AS_IT_IS, Captured, inputs, split, split_or_whole, whole
from harness.capture.verify import verify

__all__ = ["AS_IT_IS", "Captured", "inputs", "names", "split", "split_or_whole", "unsplit", "verify", "whole"]
