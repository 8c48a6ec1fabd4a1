"""AutoDDL (tensor parallelism planned for each matmul): its figures and tables next to ours, and its claims."""
