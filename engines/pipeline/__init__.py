"""Any schedule as data, executed by ranks: an order of forward and backward passes, whole or in halves."""
