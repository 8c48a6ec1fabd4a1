"""Real images to segment: `config.py` holds the keys, `images.py` the batches, the others where images are from."""
