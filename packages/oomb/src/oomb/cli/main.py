"""`oomb`: reads the command line, and turns what a user got wrong into one line."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from oomb.cli.commands import COMMANDS

ABOUT = "Train causal language models on very long contexts, with exact gradients, on one machine."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns: 0; 1 for a check that failed; 2 for what the caller got wrong, after one line on stderr; 130 or 143 when
        interrupted or terminated
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: threads that spin take the cores of others
    try:
        return _dispatch(argv)
    except (ValueError, MemoryError, FloatingPointError, OSError) as error:
        return _say(str(error) or type(error).__name__)
    except Exception as error:
        # Of the many kinds that libraries raise, these are the user's: memory of the GPU, a disk that is full.
        kind = type(error).__name__
        if kind == "OutOfMemoryError":
            return _say(
                f"out of GPU memory: {error}; make chunk_tokens smaller, set gpu_kv_budget_bytes so that pages go to "
                "host memory, or shorten the context"
            )
        if kind == "SafetensorError":
            return _say(f"the checkpoint could not be written, the one before it is as it was: {error}")
        raise
    except KeyboardInterrupt:
        print("\noomb: interrupted", file=sys.stderr)
        return 130


def _say(message: str) -> int:
    if message.startswith("Caught ") and "\nOriginal Traceback" in message:  # in a worker that reads data
        message = message.strip().splitlines()[-1].partition(": ")[2] or message
    print(f"oomb: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _dispatch(argv: list[str]) -> int:
    from oomb.cli.options import Parser, add_options, read_settings  # torch comes with it: here an interrupt is caught

    top = Parser(prog="oomb", description=ABOUT, allow_abbrev=False)
    top.add_argument("--version", action="version", version=_version())
    listed = "; ".join(f"{name}: {command.about}" for name, command in COMMANDS.items())
    top.add_argument("command", choices=list(COMMANDS), help=f"{listed}. `oomb COMMAND --help` tells more")
    top.parse_args(argv[:1] or ["--help"])
    command = COMMANDS[argv[0]]
    parser = Parser(
        prog=f"oomb {argv[0]}",
        description=command.help,
        epilog=command.more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage=f"oomb {argv[0]} [CONFIG.yaml] [--key value ...]",
    )
    add_options(parser)
    settings = read_settings(parser, argv[1:])
    dry_run = any(word.replace("_", "-") == "--dry-run" for word in argv)
    return importlib.import_module(command.module).run(settings, dry_run=dry_run)  # transformers too, only for a run


def _version() -> str:
    try:
        return version("oomb")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
