"""Everything that refuses a run before it starts: all problems at once, each with its fixes."""
