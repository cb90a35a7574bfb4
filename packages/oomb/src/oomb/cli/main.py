"""`oomb`: reads the command line, and turns what a user got wrong into one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

ABOUT = "Train causal language models on very long contexts, with exact gradients, on one machine."

TRAIN_HELP = """\
Train a causal language model on sequences far longer than a chunk, with exact gradients.

Without arguments: a small model and a byte-level tokenizer made on the spot, trained on the running Python's own
standard library. Otherwise name the model, the data and the context, in a YAML file or as `--key value`; the command
line wins. Keys may be written with dashes or underscores.

  oomb train --model path/to/model --data books/ --context 131072
  oomb train run.yaml --dry-run                            say what would be done, and stop
  oomb train run.yaml --resume true                        go on where Ctrl-C, SIGTERM or a crash ended it
  oomb train run.yaml --adapter lora --optim adamw_8bit    adapters; optimizers by transformers' names
"""

TRAIN_MORE = """\
Every field of transformers.TrainingArguments is a setting too, by its own name: --gradient-accumulation-steps 8,
--optim paged_adamw_8bit, --save-steps 50, --eval-steps 50, --report-to tensorboard, --neftune-noise-alpha 5,
--label-smoothing-factor 0.1, --lr-scheduler-type linear, --activation-checkpointing true, --use-liger-kernel true.
"""

COMMANDS = {
    "train": "train a model",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns: 0; 2 for what the caller got wrong, after one line on stderr; 130 when interrupted
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
    print(f"oomb: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _dispatch(argv: list[str]) -> int:
    from oomb.cli.options import Parser, add_options, read_settings  # torch comes with it: here an interrupt is caught

    top = Parser(prog="oomb", description=ABOUT, allow_abbrev=False)
    top.add_argument("--version", action="version", version=_version())
    listed = "; ".join(f"{name}: {what}" for name, what in COMMANDS.items())
    top.add_argument("command", choices=list(COMMANDS), help=f"{listed}. `oomb COMMAND --help` tells more")
    top.parse_args(argv[:1] or ["--help"])
    train = Parser(
        prog="oomb train",
        description=TRAIN_HELP,
        epilog=TRAIN_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="oomb train [CONFIG.yaml] [--key value ...]",
    )
    add_options(train)
    settings = read_settings(train, argv[1:])
    from oomb.cli.train import run  # transformers too, only for a run

    dry_run = any(word.replace("_", "-") == "--dry-run" for word in argv)
    return run(settings, dry_run=dry_run)


def _version() -> str:
    try:
        return version("oomb")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
