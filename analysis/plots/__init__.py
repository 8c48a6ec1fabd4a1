"""The papers' figures, and the race, drawn from records: one file for each, one style for all."""
