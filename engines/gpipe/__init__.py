"""A synchronous micro-batch pipeline with recomputation, as torchgpipe describes it."""
