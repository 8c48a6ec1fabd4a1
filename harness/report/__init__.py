"""Output of a run: progress, tables, timelines, periodic schedules."""

from harness.host import interrupt

interrupt.of_command()
