"""Starts training processes by fork, MPI or srun, watches them, and says why one has failed."""
