"""A search for the order of a pipeline's tasks with the least step time, under a memory limit of each device."""
