"""`python -m harness.worker`: the process that trains, profiles or measures. Imports torch."""
