"""Tensor parallelism layer by layer: every matrix product split as the plan says (AutoDDL)."""
