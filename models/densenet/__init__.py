"""DenseNet: `config.py` holds its keys, `densenet.py` the network."""
