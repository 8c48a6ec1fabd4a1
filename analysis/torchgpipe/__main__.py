"""See analysis.torchgpipe.page."""

from __future__ import annotations

import sys

from analysis import paper_cli
from analysis.torchgpipe.page import PAGE

if __name__ == "__main__":
    sys.exit(paper_cli.main(PAGE, sys.argv[1:]))
