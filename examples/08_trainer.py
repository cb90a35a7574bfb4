"""OombTrainer: a transformers Trainer on sequences eight times its chunk, with adapters, interrupted and gone on with.

Documents of different lengths are packed side by side; the adapters are saved in peft's form.
"""

from __future__ import annotations

import signal
import sysconfig
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback, TrainingArguments

from oomb import ChunkConfig, OombTrainer
from oomb.packing import Packer, Tokens, collate
from oomb.tiny import byte_tokenizer, tiny_model

CONTEXT, STEPS = 1024, 6


def sequences() -> list[dict]:
    """Files of Python's library as documents: long ones split, short ones packed."""
    tokenizer, packer = byte_tokenizer(), Packer(CONTEXT)
    made = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:12]:
        ids = tokenizer(path.read_text(encoding="utf-8")[:3000], return_tensors="np")["input_ids"][0].astype("int32")
        made += packer.add([Tokens(ids)])
    made += packer.rest()
    print(f"{packer.counts.documents} documents in {len(made)} sequences, {packer.counts.packed} of them packed")
    return [sequence.row() for sequence in made]


def trainer(output: str, *callbacks: TrainerCallback) -> OombTrainer:
    torch.manual_seed(0)  # the adapters' first weights
    model = get_peft_model(tiny_model(CONTEXT, seed=0), LoraConfig(r=8, target_modules="all-linear"))
    arguments = TrainingArguments(
        output, max_steps=STEPS, per_device_train_batch_size=1, learning_rate=1e-2, logging_steps=1, report_to="none",
        save_strategy="no", remove_unused_columns=False, disable_tqdm=True, seed=0,
    )  # fmt: skip
    return OombTrainer(
        model, arguments, train_dataset=sequences(), data_collator=collate, callbacks=list(callbacks),
        chunk_config=ChunkConfig(chunk_tokens=128, page_tokens=32),
    )  # fmt: skip


class Stop(TrainerCallback):
    """What Ctrl-C does, in the middle of the fourth step."""

    def on_chunk(self, args, state, control, done, total):
        if state.global_step == 3 and done == total // 2:
            signal.raise_signal(signal.SIGINT)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = trainer(f"{folder}/whole")
        whole.train()
        stopped = trainer(f"{folder}/stopped", Stop())
        try:
            stopped.train()
        except KeyboardInterrupt:
            print(f"stopped in step {stopped.state.global_step + 1}")
        resumed = trainer(f"{folder}/stopped")
        resumed.train(resume_from_checkpoint=True)
        same = all((a == b).all() for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))
        print(f"the run that was stopped ends with the same weights, bit for bit: {same}")
        assert same
        resumed.save_model(f"{folder}/adapter")
        print("saved:", sorted(path.name for path in Path(folder, "adapter").iterdir()))


if __name__ == "__main__":
    main()
