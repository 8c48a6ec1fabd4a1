"""AutoDDL (tensor parallelism planned product by product): its figures and tables beside ours, and its claims."""
