"""Notebooks: one for each paper, and one that compares all schemes; text (jupytext) with the executed .ipynb."""
