"""MadPipe (pipelines under a memory limit): its figures beside ours, and its claims."""
