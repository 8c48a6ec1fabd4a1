"""VGG13: `config.py` holds its keys, `vgg.py` the network."""
