"""The commands: what their help says, and which module runs them."""

from __future__ import annotations

from dataclasses import dataclass

SETTINGS = """\
Settings stand in a YAML file or as `--key value`; the command line wins. Keys may have dashes or underscores.
"""

TRAINER_SETTINGS = """\
Every field of transformers.TrainingArguments is a setting too, by its own name: --gradient-accumulation-steps 8,
--optim paged_adamw_8bit, --save-steps 50, --eval-steps 50, --report-to tensorboard, --neftune-noise-alpha 5,
--label-smoothing-factor 0.1, --lr-scheduler-type linear, --activation-checkpointing true, --use-liger-kernel true.
"""

TRAIN = f"""\
Train a causal language model on sequences far longer than a chunk, with exact gradients.

Without arguments: a small model and a byte-level tokenizer made on the spot, trained on the running Python's own
standard library. Otherwise name the model, the data and the context.
{SETTINGS}
  oomb train --model path/to/model --data books/ --context 131072
  oomb train run.yaml --dry-run                            say what would be done, and stop
  oomb train run.yaml --resume true                        go on where Ctrl-C, SIGTERM or a crash ended it
  oomb train run.yaml --adapter lora --optim adamw_8bit    adapters; optimizers by transformers' names
"""

VERIFY = f"""\
Is the chunked gradient that of the whole sequence, for this model, in this precision? Both are computed at a short
context and held against a run in the next wider precision; a pass, or the parameter that is off and by how much.
It takes the settings of `oomb train`; of the data the first tokens are read, without data they are random.
{SETTINGS}
  oomb verify --model path/to/model --dtype bfloat16
  oomb verify run.yaml --context 2048 --chunk-tokens 512
"""

BENCH = f"""\
How long does a forward and backward pass take, and in how much memory? Three chunk lengths are tried on random tokens
(or the one that is set), each once to warm up and `--steps` times (3) to measure. Without an optimizer.
It takes the settings of `oomb train`; data are not read.
{SETTINGS}
  oomb bench --model path/to/model --context 65536
  oomb bench run.yaml --chunk-tokens 4096 --steps 5
"""

PLAN = f"""\
Will a training step fit, and how long will it take? GPU and host bytes by part, told from the model's config alone: no
weights are loaded. What is auto is resolved as a step on such a machine would resolve it. Seconds come from a few short
steps of the model's own layers on this machine, or for a GPU that is not here from stated rates (--rates); the longest
context that fits is said, and for one that does not what would make it fit.
It takes the settings of `oomb train`; data are not read. `oomb train` prints the same plan and follows it.
{SETTINGS}
  oomb plan --model path/to/model --context 262144 --dtype bfloat16
  oomb plan --model path/to/model --context 1048576 --adapter lora --gpu-memory 80GiB --host-memory 512GiB --rates H200
"""


@dataclass(frozen=True)
class Command:
    """module: has `run(settings, *, dry_run)`, which returns the exit code"""

    about: str
    help: str
    module: str
    more: str = ""


COMMANDS = {
    "train": Command("train a model", TRAIN, "oomb.cli.train", TRAINER_SETTINGS),
    "plan": Command("say what a step would take, and whether it fits", PLAN, "oomb.cli.plan"),
    "verify": Command("compare a model's chunked gradient with the whole one", VERIFY, "oomb.cli.verify"),
    "bench": Command("time a step at several chunk lengths", BENCH, "oomb.cli.bench"),
}
