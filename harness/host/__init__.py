"""This machine: its devices, memory, allocator, caches, and the Slurm job that it is part of. Free of torch."""
