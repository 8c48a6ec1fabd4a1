"""The plan on the terminal: its stages, and the pattern or the strategies of matrix products where it has some."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from harness.pattern_table import pattern_table
from harness.plan import Plan
from harness.profile import ModelProfile
from harness.stage_table import stage_table
from harness.strategy_table import comparison_table, strategy_table


def plan_tables(plan: Plan, profile: ModelProfile, planner: str) -> Group:
    """A table of stages; a plan's pattern; its strategies; others' communication, where `planner` compares."""
    tables: list[Table | Group] = [stage_table(plan, profile)]
    if plan.pattern:
        tables.append(pattern_table(plan, plan.pattern))
    if plan.strategy:
        tables.append(strategy_table(plan))
    if "baselines" in plan.predicted:
        tables.append(comparison_table(plan, planner))
    return Group(*(part for number, table in enumerate(tables) for part in ([Text()] * bool(number) + [table])))
