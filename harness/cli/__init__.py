"""From the command line to a configuration, and `--help`."""
