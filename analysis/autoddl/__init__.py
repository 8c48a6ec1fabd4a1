"""AutoDDL (tensor parallelism planned product by product): its figures and tables next to ours, and its claims."""
