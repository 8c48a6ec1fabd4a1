"""Starts training processes by fork, MPI, srun or ssh, or joins those of torchrun, watches them, and says why one has failed."""
