"""The front door: `python run.py engine=gpipe model=unet`; `python run.py --help` lists every key."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from harness.problem import CannotRun, Problem
from harness.record import EXIT_CODES

ALONE = {"SLURM_STEP_NUM_TASKS": 1, "SLURM_PROCID": 0, "PMI_SIZE": 1, "OMPI_COMM_WORLD_SIZE": 1, "WORLD_SIZE": 1}
"""What srun, mpiexec and torchrun tell a process that is alone; SLURM_NTASKS is the whole job's, also in its parent."""


def main(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Returns the exit code; mistakes of the user are printed, all at once, without a traceback."""
    options = _parser().parse_intermixed_args(arguments)
    try:
        _refuse_many_ranks(environment)
        return _dispatch(options)
    except CannotRun as error:
        print(error, file=sys.stderr)
        return EXIT_CODES["infeasible"]
    except KeyboardInterrupt:
        return EXIT_CODES["preempted"]


def _dispatch(options: argparse.Namespace) -> int:
    # imported here: each way needs little of the others
    if options.config_dir:
        from harness.compose import search

        search(options.config_dir)
    if options.help:
        from harness import help

        print(help.text())
        return 0
    if options.multirun:
        from harness import sweep

        return sweep.main(options.overrides)
    from harness.compose import compose

    config = compose(options.overrides)
    if options.cfg:
        from omegaconf import OmegaConf

        print(OmegaConf.to_yaml(config), end="")
        return 0
    from harness import runner

    return EXIT_CODES[runner.run(config, options.overrides).status]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("run.py", add_help=False, allow_abbrev=False)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("-h", "--help", action="store_true")
    ways.add_argument("-m", "--multirun", action="store_true")
    ways.add_argument("-c", "--cfg", choices=["job"])
    parser.add_argument("--config-dir", metavar="DIR")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser


def _refuse_many_ranks(environment: Mapping[str, str]) -> None:
    """One parent composes once; it is not itself one of several ranks."""
    for name, alone in ALONE.items():
        value = environment.get(name, "")
        if value.isdigit() and int(value) > alone:
            what = "says that this is one of several ranks; run.py is the one parent that starts them"
            raise CannotRun([Problem(f"{name} {value}", what, "python run.py ... without srun or mpiexec")], "run.py")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
