"""torchgpipe (arXiv 2004.09910), section 4: its tables next to ours, and its claims."""
