"""AutoDDL: a strategy for each matrix product (harness.sbp), found exactly or by the searches of the paper."""
