"""`python -m harness.worker`: the process that trains, profiles or measures. Imports torch."""

import sys

from harness.host import bytecode

if sys.argv[:1] == ["-m"]:  # while Python looks for the module that -m names: before the imports of a worker
    sys.excepthook = bytecode.report
