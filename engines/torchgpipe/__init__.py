"""The PyPI package torchgpipe 0.0.7 as a peer behind the common interface."""
