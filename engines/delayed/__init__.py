"""The delays of an asynchronous pipeline, on one device."""
