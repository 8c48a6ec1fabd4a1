"""torch's DistributedDataParallel: every device holds the whole model and a share of the batch."""
