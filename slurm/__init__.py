"""Sweeps as Slurm arrays: `python -m slurm.submit +sweeps=NAME`, then `python -m slurm.status FOLDER`."""

from harness.host import interrupt

interrupt.of_command()
