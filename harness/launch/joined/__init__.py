"""Takes part as one of the ranks that torchrun has started."""
