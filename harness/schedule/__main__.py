"""`python -m harness.schedule NAME KEY=VALUE ...` draws a schedule: see harness.report.schedule_text."""

import sys

from harness.host import command

command.begin()

from harness.report.schedule_text import main  # noqa: E402

sys.exit(main())
