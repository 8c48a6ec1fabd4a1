"""torch.distributed.pipelining as a peer behind the common interface."""
