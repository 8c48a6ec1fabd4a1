"""Dense layers in a row: `config.py` holds their keys, `mlp.py` the network."""
