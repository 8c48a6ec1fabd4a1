"""Tokens of a text: `config.py` holds the keys, `text.py` the batches, `corpus.py` the tokens, `source.py` the file."""

from harness.host import command

command.of_command()
