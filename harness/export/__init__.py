"""`mode=plan export=FILE`: the plan as other systems read it, or why such a system cannot follow it."""
