"""GPT: `config.py` holds its keys, `gpt.py` the chain of layers, `block.py` what a transformer layer is made of."""
