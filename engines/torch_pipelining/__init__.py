"""torch.distributed.pipelining as a peer after the common interface."""
