"""Models that are not of the zoo, with every engine, as a user runs them: `python -m tests.any_model`."""
