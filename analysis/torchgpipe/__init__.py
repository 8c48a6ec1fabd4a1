"""torchgpipe (arXiv 2004.09910), section 4: its tables beside ours, and its claims."""
