"""Llama: `config.py` holds its keys, `llama.py` the chain of layers, `block.py` what a transformer layer is made of."""
