"""Sweeps as Slurm arrays: `python -m slurm.submit +sweeps=NAME`, then `python -m slurm.status FOLDER`."""

from harness.host import command

command.of_command()
