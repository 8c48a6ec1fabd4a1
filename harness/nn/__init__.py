"""Building blocks for models: skips, dropout, batch norm, tied parameters. Imports torch."""
