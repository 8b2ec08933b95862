"""The command line: ``rlobjectives fit|validate|test --config run.yaml`` and ``rlobjectives algorithms``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

_HELP = """\
usage: rlobjectives COMMAND [options]

Train language models with RL objectives, from one YAML file.

commands:
  fit         train:              rlobjectives fit --config run.yaml
  validate    measure once:       rlobjectives validate --config run.yaml --ckpt_path last.ckpt
  test        the same on the test set
  algorithms  list the named objectives, their parts, what they need and where they come from

options:
  -h, --help  show this text; `rlobjectives fit --help` lists every option of a run
  --version   show the version

Any value of the file can be given on the command line as well, and wins:
  rlobjectives fit --config run.yaml --trainer.max_steps=100 --model.init_args.micro_batch_size=8

What is wrong is said in one message; RLOBJECTIVES_DEBUG=1 in the environment shows the traceback as well.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: What follows the program's name; by default that of this process.

    Returns:
        The exit status: 0; 2 when the command or its configuration is wrong; 1 when this library found something wrong
        in the run itself.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    command, rest = (given[0], given[1:]) if given else ("--help", [])
    if command in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0
    if command == "--version":
        from rlobjectives import __version__

        print(f"rlobjectives {__version__}")
        return 0
    if command == "algorithms":
        from rlobjectives.cli import algorithms

        return algorithms.run(rest)
    if command in ("fit", "validate", "test"):
        from rlobjectives.integrations.extras import MissingExtraError, need

        try:
            need(f"`rlobjectives {command}`", "lightning")
        except MissingExtraError as error:
            return _refuse(str(error))
        from rlobjectives.cli import training

        return training.run(arguments)
    return _refuse(f"unknown command {command!r}; the commands are fit, validate, test and algorithms")


def _refuse(message: str) -> int:
    print(f"rlobjectives: error: {message}", file=sys.stderr)
    return 2
