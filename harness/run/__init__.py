"""One run in its folder: record, checkpoints, resume, metrics, and the parent process that drives it."""
