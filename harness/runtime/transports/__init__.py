"""What sends tensors from stage to stage: the interface, and transports over MPI and torch.distributed."""
