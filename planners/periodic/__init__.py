"""The parts of planners of periodic pipelines: chains, allocations, task times (MadPipe, section 4)."""
