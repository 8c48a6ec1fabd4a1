"""MadPipe (pipelines under a memory limit): its figures next to ours, and its claims."""
