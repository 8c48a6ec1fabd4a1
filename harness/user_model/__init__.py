"""Models of the user's own: what `model=FILE.py:NAME` names, which keys it has, and how a Model is made of it."""
