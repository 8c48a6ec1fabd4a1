"""The DeepSpeed library: its pipeline with data parallelism, and ZeRO."""
