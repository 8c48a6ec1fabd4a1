"""The reference: the whole model on one device."""
