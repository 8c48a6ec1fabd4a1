"""AutoDDL: a strategy for each matmul (harness.sbp), found exactly or by the searches of the paper."""
