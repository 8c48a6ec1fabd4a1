"""Output of a run: progress, tables, timelines, periodic schedules."""
