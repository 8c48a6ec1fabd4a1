"""Suggest what was meant by names of other frameworks, each after it was tried: it takes the place of a suggestion by
spelling.

    tp=2   ->   mesh.tensor=2                                 engine=gpipe has no tensor shards
           ->   engine=sbp planner=megatron mesh.tensor=2     works, and is suggested
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from omegaconf import DictConfig

from harness.checks import other_frameworks
from harness.checks.other_frameworks import ROWS, Row
from harness.config import registry
from harness.config.overrides import has, having, value_of
from harness.core.problem import LEAVE_OUT, Fix, Problem, apply, bare_key, spelled

Examine = Callable[[Sequence[str]], tuple[DictConfig, list[Problem]]]
"""The configuration of some overrides, and all that is wrong with them. Raises CannotRun where there is none."""
ROUNDS = 3
"""The most times that a fix takes in what makes it work: the first fixes of the problems that it has."""


def improve(
    problems: Sequence[Problem],
    overrides: Sequence[str],
    config: DictConfig,
    choices: Mapping[str, Collection[str]],
    examine: Examine,
) -> list[Problem]:
    """The problems of the overrides, with what was meant by names of other frameworks.

    `config` is composed of all that could be taken, `choices` are those of each group. Suggestions work together.
    """
    rows = {
        problem.key: row
        for problem in problems
        if not has(config, problem.key) and (row := other_frameworks.row(problem.key, config))
    }
    engines = {
        problem.key: fixes
        for problem in problems
        if isinstance(problem.value, str) and (fixes := _elsewhere(problem.key, problem.value, choices))
    }
    if not rows and not engines:
        return list(problems)
    trial = _Trial(apply(overrides, {bare_key(problem.key): LEAVE_OUT for problem in problems}), examine)
    found: dict[str, Problem] = {}
    for problem in problems:
        if problem.key in engines:
            found[problem.key] = _with_choice(problem, engines[problem.key], trial)
    for problem in sorted(problems, key=lambda one: ROWS.index(rows[one.key]) if one.key in rows else -1):
        if problem.key in rows:
            found[problem.key] = _with_key(problem, rows[problem.key], value_of(overrides, problem.key), trial)
    return [found.get(problem.key, problem) for problem in problems]


@dataclass
class _Trial:
    """The overrides without those that are wrong, to which each fix that was found is added."""

    overrides: list[str]
    examine: Examine
    kept: Fix = field(default_factory=dict)

    @property
    def config(self) -> DictConfig:
        return self.examine(self.overrides)[0]

    def working(self, fix: Fix) -> tuple[Fix, Problem | None]:
        """A fix with what it needs to work, and None; else the fix, and the problem that remains."""
        known = {(problem.key, problem.message) for problem in self.examine(self.overrides)[1]}
        fixed = fix
        for _ in range(ROUNDS):
            left = self.examine(apply(self.overrides, fixed))[1]
            left = [problem for problem in left if (problem.key, problem.message) not in known]
            if not left:
                return fixed, None
            further = [self._compatible(problem, fixed) for problem in left]
            if not any(further):
                return fix, left[0]
            fixed = {key: value for one in (fixed, *further) for key, value in (one or {}).items()}
        return fix, left[0]

    def _compatible(self, problem: Problem, fix: Fix) -> Fix | None:
        """The first fix of a problem that leaves what was found so far."""
        return next((one for one in problem.fixes if not _conflicts(one, {**self.kept, **fix})), None)

    def keep(self, fix: Fix) -> None:
        self.overrides = apply(self.overrides, fix)
        self.kept |= fix


def _conflicts(fix: Fix, given: Fix) -> list[str]:
    """The keys to which a fix gives another value than they are given."""
    return [key for key, value in fix.items() if given.get(key, value) != value]


def _elsewhere(group: str, name: str, choices: Mapping[str, Collection[str]]) -> tuple[Fix, ...]:
    """What a choice that its group does not have is: an engine of another framework, or a choice of another group."""
    if group not in choices or name in choices[group]:
        return ()
    if group == "engine" and (known := other_frameworks.engine(name)):
        return known
    return tuple({other: name} for other, names in choices.items() if name in names)[:1]


def _with_choice(problem: Problem, fixes: Sequence[Fix], trial: _Trial) -> Problem:
    tried = [trial.working(fix) for fix in fixes]
    working = [fix for fix, wrong in tried if wrong is None]
    if not working:
        return problem
    trial.keep(working[0])
    return replace(problem, fixes=tuple({problem.key: LEAVE_OUT} | fix for fix in working))


def _with_key(problem: Problem, row: Row, value: object, trial: _Trial) -> Problem:
    said = replace(problem, message=f"{problem.message} ({row.frameworks}: {row.meaning})", fixes=(), hint="")
    config = trial.config
    key = row.key_of(config.model.name)
    if key.startswith("model.") and not has(config, key):
        return replace(said, hint=_with_models(row))
    meant = row.meant(value, config)
    hints = [meant.hint]
    for fix in meant.fixes:
        if taken := _conflicts(fix, trial.kept):
            hints.append(f"{taken[0]}={spelled(trial.kept[taken[0]])} follows from another one of these keys")
            continue
        working, left = trial.working(_without_chosen(fix, config))
        if left is None:
            trial.keep(working)
            return replace(said, fixes=(working | {problem.key: LEAVE_OUT},))
        hints.append(f"{key}=..., but {left.statement}")
    return replace(said, hint=next(filter(None, hints), ""))


def _with_models(row: Row) -> str:
    """The models that have a row's key, and the keys of those that have another one: model.hidden of model=gpt."""
    group, _, name = row.key.partition(".")
    same = [f"model={one}" for one in having(group, name) if row.key_of(one) == row.key]
    return ", or ".join([f"{row.key} of {' or '.join(same)}", *(f"{key} of model={one}" for one, key in row.models)])


def _without_chosen(fix: Fix, config: DictConfig) -> Fix:
    """A fix without the choices that are there already, whose other keys it would take away."""
    return {key: value for key, value in fix.items() if key not in registry.GROUPS or config[key].name != value}
