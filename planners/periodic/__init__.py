"""What planners of periodic pipelines share: chains, allocations, when each task starts (MadPipe, section 4)."""
