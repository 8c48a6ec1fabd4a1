"""Sweeps: points from overrides, each run in its folder, and a live table."""
