"""Periodic patterns, repeated without a flush, with two versions of the weights."""
