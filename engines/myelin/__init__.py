"""Myelin: a pipeline without a fixed order, driven by messages, with data parallelism (published as AxoNN)."""
