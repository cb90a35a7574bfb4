"""`oomb`: reads the command line, and turns what a user got wrong into one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from oomb.cli.options import Parser, add_options, read_settings
from oomb.cli.train import run

TRAIN_HELP = """\
Train a causal language model on sequences far longer than a chunk, with exact gradients.

Without arguments: a small model and a byte-level tokenizer made on the spot, trained on the running Python's own
standard library. Otherwise name the model, the data and the context, in a YAML file or as `--key value`; the command
line wins. Keys may be written with dashes or underscores.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns: 0; 2 for what the caller got wrong, after one line on stderr; 130 when interrupted
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(argv)
    except (ValueError, MemoryError, FloatingPointError, OSError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"oomb: error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\noomb: interrupted", file=sys.stderr)
        return 130


def _dispatch(argv: list[str]) -> int:
    top = Parser(prog="oomb", description=__doc__, allow_abbrev=False)
    top.add_argument("--version", action="version", version=_version())
    top.add_argument("command", choices=["train"], help="train: train a model; `oomb train --help` tells more")
    top.parse_args(argv[:1] or ["--help"])
    train = Parser(
        prog="oomb train",
        description=TRAIN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="oomb train [CONFIG.yaml] [--key value ...]",
    )
    add_options(train)
    settings = read_settings(train, argv[1:])
    return run(settings)


def _version() -> str:
    try:
        return version("oomb")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
