"""The PyPI package torchgpipe 0.0.7 as a peer after the common interface."""
