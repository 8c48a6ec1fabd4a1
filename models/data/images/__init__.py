"""Real images to segment or to classify: `config.py` holds the keys, `images.py` the batches, `pool.py` what they are
drawn from; `digits_on_photos.py`, `digits.py`, `folder.py` and `class_folders.py` are where images come from."""
