"""The front door: `python run.py engine=gpipe model=unet`. `python run.py --help` lists modes and choices, `--help all`
every key, `engine=gpipe --help` those of this choice."""

from __future__ import annotations

import gc
import os
import signal

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def _ended(number: int, frame: object) -> None:
    """A signal outside of a run (`harness.launch.signals` is in charge of one): nothing is to be cleaned up, and an
    exception in the midst of an import would be a traceback, or be lost."""
    os.write(2, f"ended by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)


if __name__ == "__main__":  # before the other imports, which take most of the first second
    for _number in ENDING:
        if signal.getsignal(_number) in (signal.SIG_DFL, signal.default_int_handler):  # nohup has SIGHUP ignored
            signal.signal(_number, _ended)

import sys  # noqa: E402

from harness.host import bytecode  # noqa: E402

if __name__ == "__main__":
    sys.excepthook = bytecode.report
    gc.set_threshold(100_000)  # what is imported stays, and looking for garbage in it takes a fifteenth of a search

import argparse  # noqa: E402
import shlex  # noqa: E402
from collections.abc import Iterator, Mapping, Sequence  # noqa: E402
from contextlib import contextmanager  # noqa: E402

from harness.core.problem import CannotRun, Problem  # noqa: E402
from harness.core.record import EXIT_CODES  # noqa: E402
from harness.host import launched, output  # noqa: E402

ALONE = {"SLURM_STEP_NUM_TASKS": 1, "SLURM_PROCID": 0, "PMI_SIZE": 1, "OMPI_COMM_WORLD_SIZE": 1}
"""Variables that srun and mpiexec set for a process that is alone; SLURM_NTASKS is the whole job's, also in
its parent."""


def main(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Returns the exit code; mistakes of the user are printed, all at once, without a traceback."""
    parser = _parser()
    options, unknown = parser.parse_known_intermixed_args(arguments)
    try:
        if unknown:
            _refuse_unknown(parser, arguments, unknown)
        _refuse_many_ranks(environment)
        _refuse_no_working_directory()
        with _among_ranks(options, environment):
            if (code := _other_than_a_run(options)) is not None:
                return code
            from harness.cli.compose import compose  # imports are where they are needed: each command needs few of them
            from harness.run import runner

            return EXIT_CODES[runner.run(compose(options.overrides), options.overrides).status]
    except CannotRun as error:
        print(error, file=sys.stderr)
        return EXIT_CODES["infeasible"]
    except ModuleNotFoundError as error:
        if error.name not in ("hydra", "omegaconf", "rich"):
            raise
        print(f"{sys.executable} lacks {error.name} -> make setup, then source .venv/bin/activate", file=sys.stderr)
        return EXIT_CODES["infeasible"]
    except KeyboardInterrupt:
        return EXIT_CODES["preempted"]


@contextmanager
def _among_ranks(options: argparse.Namespace, environment: Mapping[str, str]) -> Iterator[None]:
    """Where torchrun has started this process as one of several ranks: rank 0 does what is asked, and the others take
    part in its run and print nothing."""
    alone = options.help or options.cfg
    if not launched.several(environment):
        yield
        return
    own = launched.place(environment)
    from harness.launch import supervisor
    from harness.launch.joined import herald

    if own.rank and alone:
        sys.exit(output.code(0))
    if own.rank:
        supervisor.become_worker("join")
    if alone:
        yield
        return
    with herald.started():
        _refuse_many_runs(options, own)
        yield


def _refuse_many_runs(options: argparse.Namespace, own: launched.Place) -> None:
    """Refuse what starts ranks several times: those of torchrun are there once."""
    mode = next((word for word in options.overrides if word in ("mode=race", "mode=fit", "mode=tune")), "")
    key, value = ("--multirun", None) if options.multirun else ("mode", mode.removeprefix("mode="))
    if options.multirun or mode:
        message = f"starts runs of its own, and this is one of several ranks ({own.count_name}={own.count})"
        raise CannotRun([Problem(key, value, message, hint="python run.py ... without torchrun")], "run.py")


def _is_sweep_of_races(options: argparse.Namespace) -> bool:
    """Whether the points of the sweep's file are races."""
    keys = {text.partition("=")[0] for text in options.overrides}
    if not options.multirun or "+sweeps" not in keys or "mode" in keys:
        return False
    from harness.sweep import points

    return points.of_races(options.overrides) is not None


def _other_than_a_run(options: argparse.Namespace) -> int | None:
    """Do what the command line asks for, and return the exit code; None where it asks for one run."""
    from harness.user_model import reference

    options.overrides = reference.typed(options.overrides)
    if options.config_dir is not None:
        from harness.cli.compose import search

        search(options.config_dir)
    if options.help:
        from harness.cli import help

        print(help.text(options.overrides))
        return output.code(0)
    if not options.cfg and ("mode=race" in options.overrides or _is_sweep_of_races(options)):
        from harness.races import race

        return race.main(options.overrides, options.multirun)
    if "mode=fit" in options.overrides and not options.cfg:
        from harness.sweep import fit

        return fit.main(options.overrides)
    if "mode=tune" in options.overrides and not (options.cfg or options.multirun):
        print("mode=tune: reading the configuration", flush=True)
        from harness.races import tuned

        return tuned.main(options.overrides)
    if options.multirun:
        from harness.sweep import local

        return local.main(options.overrides)
    if options.cfg:
        from omegaconf import OmegaConf

        from harness.cli.compose import compose

        print(OmegaConf.to_yaml(compose(options.overrides)), end="")
        return output.code(0)
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("run.py", add_help=False, allow_abbrev=False)
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("-h", "--help", action="store_true")
    modes.add_argument("-m", "--multirun", action="store_true")
    modes.add_argument("-c", "--cfg", choices=["job"])
    parser.add_argument("--config-dir", metavar="DIR")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser


def _refuse_unknown(parser: argparse.ArgumentParser, arguments: Sequence[str], unknown: Sequence[str]) -> None:
    """End with what argparse does not know, and the command without dashes."""
    from harness.cli import dashes

    command = " ".join(["python run.py", *map(shlex.quote, dashes.taken_away(arguments, unknown))])
    parser.error(f"unrecognized arguments: {' '.join(unknown)}\nkeys have no dashes: {command}")


def _refuse_many_ranks(environment: Mapping[str, str]) -> None:
    """Refuse to start as one of several ranks, unless torchrun's variables say of which."""
    if launched.several(environment):
        if wrong := launched.problems(environment):
            raise CannotRun(wrong, "run.py")
        return
    for name, alone in ALONE.items():
        value = environment.get(name, "")
        if value.isdigit() and int(value) > alone:
            message = "says that this is one of several ranks; run.py is the one parent that starts them"
            hint = "python run.py ... without srun or mpiexec"
            raise CannotRun([Problem(name, value, message, hint=hint)], "run.py")


def _refuse_no_working_directory() -> None:
    """Refuse to start where nobody can say what a relative path means."""
    try:
        os.getcwd()
    except OSError as error:
        problem = Problem("the working directory", None, f"is gone: {error.strerror}", hint="cd to one that exists")
        raise CannotRun([problem], "run.py") from error


if __name__ == "__main__":
    output.protect()
    code = main(sys.argv[1:])
    for _number in ENDING:  # the run has ended, Ctrl-C does not change how
        signal.signal(_number, signal.SIG_IGN)
    sys.exit(code)
