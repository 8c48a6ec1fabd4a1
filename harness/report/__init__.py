"""Output of a run: progress, tables, timelines, periodic schedules."""

from harness.host import command

command.of_command()
