"""Benchmarks: ratios within one run, contestants in turns, medians with their spread (`make bench`)."""
