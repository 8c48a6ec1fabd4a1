"""Measures and counts: models layer by layer, this machine, and its collectives (mode=calibrate)."""
