"""`python -m harness.schedule NAME KEY=VALUE ...` draws a schedule: see harness.report.schedule_text."""

import sys

from harness.report.schedule_text import main

sys.exit(main())
