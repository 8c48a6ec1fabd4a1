"""Inception v3 without auxiliary head: `config.py` holds its keys, `inception.py` the network."""
