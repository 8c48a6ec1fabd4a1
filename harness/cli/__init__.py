"""Turn the command line into a configuration, and print `--help`."""
