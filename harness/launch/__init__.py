"""Starts ranks by fork, MPI, srun or ssh, or joins torchrun's; watches them, and says why one has failed."""
