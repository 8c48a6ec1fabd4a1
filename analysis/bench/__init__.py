"""Benchmarks: ratios within one run, interleaved rounds, medians with their spread (`make bench`)."""
