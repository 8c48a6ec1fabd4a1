"""U-Net (B, C): `config.py` holds its keys, `unet.py` the network."""
