"""See analysis.torchgpipe.page."""

from __future__ import annotations

import sys

from analysis import command
from analysis.torchgpipe.page import PAGE

if __name__ == "__main__":
    sys.exit(command.main(PAGE, sys.argv[1:]))
