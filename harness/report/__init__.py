"""What a run prints and draws: progress, tables, timelines, periodic schedules."""
