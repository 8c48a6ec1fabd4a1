"""One module for each schedule, with a drawing of it."""
