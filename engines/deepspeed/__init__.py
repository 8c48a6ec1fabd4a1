"""The DeepSpeed library: its pipeline with data parallelism, and ZeRO."""

BUCKET = 500_000_000
"""Elements that DeepSpeed reduces or gathers at once: its memory model and its settings share it."""
