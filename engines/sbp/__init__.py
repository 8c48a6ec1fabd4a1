"""Tensor parallelism layer by layer: every matmul split as the plan says (AutoDDL)."""
