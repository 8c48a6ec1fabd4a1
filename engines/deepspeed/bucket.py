"""The size of DeepSpeed's buckets, which the engine's memory model and its settings share. Free of torch."""

BUCKET = 500_000_000
"""Elements that DeepSpeed reduces or gathers at once."""
