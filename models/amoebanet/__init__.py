"""AmoebaNet-D (L, D): `config.py` holds its keys, `amoebanet.py` the network, made of `cell.py` and `operations.py`."""
