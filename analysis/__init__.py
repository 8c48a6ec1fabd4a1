"""What is made of records: pages of the papers, tables, figures, claims, benchmarks, the report."""

from harness.host import command

command.of_command()
