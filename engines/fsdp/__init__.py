"""torch's FSDP2: every device holds a shard of each layer, and gathers a layer when its turn has come."""
