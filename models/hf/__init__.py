"""Networks of Hugging Face Transformers: `config.py` holds the keys, `hf.py` the model, `tasks.py` what it learns."""
