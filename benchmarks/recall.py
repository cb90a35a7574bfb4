"""Trained from scratch, dense and sparse: loss curves, and recall of pairs placed early and asked late.

    python -m benchmarks.recall --out runs/recall                  a GPU, a quarter of an hour
    python -m benchmarks.recall --small --out runs/recall          two CPU cores, some minutes

A sequence is source text, byte by byte. In its first quarter stand cards, tokens that each pair a key with a value;
in its last quarter keys are asked, and the value is the next token. Every model is the same network with the same
weights at the start, sees the same batches and learns text and answers alike; they differ in attention:

    dense       every page
    sparse      the page of its own, some before it, and the best by score (mean key, or bounds on the keys)
    recent      as many pages in all, the latest ones: it cannot see the cards and must fail

They begin with short sequences (eight tokens for each pair, in which all of them see everything), then
longer ones.

Recall is judged by generating: the last sixteenth of each sequence goes through the model token by token over a
paged cache, text as given, answers as the model makes them (greedy). A generated token chooses its pages by its own
query alone, where in training a page's worth of queries chose together. Each model also generates with dense
attention, the dense one with all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from oomb import ChunkConfig, chunked_backward, chunked_loss
from oomb.hf import attention_installed
from paged_kv import PagedKV, PagePool, paged_attention
from sparse_pages import PageSummary, select_pages

TEXT = 128  # bytes beyond it are shown as the last
HELD_OUT_SEED = 1 << 30
COOLING = 0.2  # the share of the steps in which the learning rate falls, at the end
GENERATED = 16  # the part of a sequence that is generated: one of so many
STAGES = ((0.6, 8), (0.2, 32), (0.2, None))  # for which share of the steps, how many tokens for each pair; none: all


@dataclass(frozen=True)
class Task:
    """Units: tokens in tokens; keys, values: how many there are; pairs a sequence, each asked once"""

    tokens: int
    pairs: int
    keys: int
    values: int

    @property
    def vocabulary(self) -> int:
        """Text, questions, answers, cards."""
        return TEXT + self.keys + self.values + self.keys * self.values

    def batch(self, text: Tensor, rows: int, seed: int) -> tuple[Tensor, Tensor]:
        """Returns: ids [B, T], and where the answers are [B, T] bool."""
        draw = torch.Generator().manual_seed(seed)
        start = torch.randint(len(text) - self.tokens, (rows, 1), generator=draw)
        ids = text[start + torch.arange(self.tokens)].long()
        keys = _some(self.keys, rows, self.pairs, draw)
        values = torch.randint(self.values, (rows, self.pairs), generator=draw)
        quarter = self.tokens // 4
        cards = TEXT + self.keys + self.values + keys * self.values + values
        ids.scatter_(1, _some(quarter, rows, self.pairs, draw), cards)
        order = _some(self.pairs, rows, self.pairs, draw)
        asked = self.tokens - quarter + 2 * _some(quarter // 2, rows, self.pairs, draw)
        ids.scatter_(1, asked, TEXT + keys.gather(1, order))
        ids.scatter_(1, asked + 1, TEXT + self.keys + values.gather(1, order))
        return ids, torch.zeros_like(ids, dtype=torch.bool).scatter_(1, asked + 1, True)

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Per token, weighed so that answers count as much as all the text together."""
        each = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")
        return each * torch.where(self.is_answer(labels), (self.tokens - 1 - self.pairs) / self.pairs, 1.0)

    def is_answer(self, ids: Tensor) -> Tensor:
        return (ids >= TEXT + self.keys) & (ids < TEXT + self.keys + self.values)


def _some(of: int, rows: int, count: int, draw: torch.Generator) -> Tensor:
    """[rows, count] different numbers below `of`, in any order."""
    return torch.rand(rows, of, generator=draw).argsort(1)[:, :count]


def source_text() -> Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = b"\n\n".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).clamp(max=TEXT - 1)


def make_model(task: Task, width: int, layers: int, head_dim: int, seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    heads = width // head_dim
    config = Qwen3Config(
        vocab_size=task.vocabulary, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(heads // 2, 1), head_dim=head_dim, tie_word_embeddings=False,
        max_position_embeddings=task.tokens,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def mixed(device: torch.device) -> contextlib.AbstractContextManager:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def train(model, task: Task, text: Tensor, chunks: ChunkConfig, given: argparse.Namespace) -> list[dict]:
    """The mean loss of text plus that of answers, short sequences first, as many tokens in each step.

    Muon for the matrices inside: with AdamW alone answers stay a guess while text is learned too (docs/log.md).

    Returns: held-out losses along the way, of sequences as long as the step's
    """
    inner = [p for name, p in model.named_parameters() if "proj" in name]
    outer = [p for name, p in model.named_parameters() if "proj" not in name]
    optimizers = (
        torch.optim.Muon(inner, lr=given.lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(outer, lr=given.lr, betas=(0.9, 0.95), weight_decay=0.01),
    )
    curve, began = [], time.perf_counter()
    for step in range(given.steps + 1):
        tokens = next(tokens for tokens, end in given.stages if step < end or end == given.steps)
        stage, rows = replace(task, tokens=tokens), given.rows * task.tokens // tokens
        if step % given.every == 0 or step == given.steps:
            losses = evaluate(model, stage.batch(text, rows, HELD_OUT_SEED), chunks)
            curve.append({"step": step, "tokens": tokens, "seconds": time.perf_counter() - began, **losses})
            print("  " + "  ".join(f"{name} {round(value, 3)}" for name, value in curve[-1].items()), flush=True)
        if step == given.steps:
            break
        left = (given.steps - step) / given.steps
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = given.lr * min((step + 1) / given.warmup, left / COOLING, 1.0)
        ids, _ = stage.batch(text, rows, step)
        with mixed(model.device):
            chunked_backward(model.train(), ids.to(model.device), loss_fn=stage.losses, config=chunks)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return curve


@torch.no_grad()
def evaluate(model, held_out: tuple[Tensor, Tensor], chunks: ChunkConfig) -> dict[str, float]:
    """Held-out loss in nats a token, of answers and of everything else."""
    ids, answer = (x.to(model.device) for x in held_out)
    labels = {"answers": ids.where(answer, -100), "text": ids.where(~answer, -100)}
    with mixed(model.device):
        return {k: float(chunked_loss(model.eval(), ids, labels=v, config=chunks)) for k, v in labels.items()}


class Decoder:
    """A model's forward pass over a paged cache, dense or sparse: whole chunks of prompt, then token by token.

    It takes the place of a training pass's context: within `attention_installed` the model's attention calls `attend`.
    """

    def __init__(self, model, chunks: ChunkConfig, rows: int, tokens: int) -> None:
        c, self.model, self.chunks = model.config, model, chunks
        with mixed(model.device):
            dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else torch.float32
        pool = PagePool(
            layers=c.num_hidden_layers, slots=rows * -(-tokens // chunks.page_tokens), page_tokens=chunks.page_tokens,
            kv_heads=c.num_key_value_heads, head_dim=c.head_dim, dtype=dtype, device=model.device,
        )  # fmt: skip
        self.kv = PagedKV(pool, batch=rows)
        self.summaries = [PageSummary(chunks.page_tokens, chunks.scorer) for _ in range(c.num_hidden_layers)]

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        """The next tokens of ids [B, C], whose predecessors were given before: logits [B, V] of the last."""
        start = self.kv.lengths[0] + self.kv.tokens[0]
        self.kv.extend(ids.shape[1])
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        with mixed(ids.device):
            out = self.model(ids, position_ids=positions, use_cache=False, logits_to_keep=1, oomb=self)
        return out.logits[:, -1]

    def attend(self, module, q: Tensor, k: Tensor, v: Tensor, *, mask, scale: float, sinks) -> Tensor:
        layer, c = module.layer_idx, self.chunks
        self.kv.append(layer, k, v)
        selected = None
        if c.attention == "sparse":
            self.summaries[layer].append(k)
            selected = select_pages(
                q, self.summaries[layer], past_pages=self.kv.lengths[0] // c.page_tokens, top_k=c.top_k_pages,
                recent=c.recent_pages, sinks=c.sink_pages,
            )  # fmt: skip
        return paged_attention(q, k, v, self.kv, layer, scale=scale, selected=selected)


def recall(model, task: Task, text: Tensor, chunks: ChunkConfig, rows: int) -> float:
    """The share of answers that the model generates rightly at the end of held-out sequences."""
    ids, answer = (x.to(model.device) for x in task.batch(text, rows, HELD_OUT_SEED + 1))
    decoder, first = Decoder(model.eval(), chunks, rows, task.tokens), task.tokens - task.tokens // GENERATED
    length = chunks.chunk_length(model.device)
    right = asked = torch.zeros((), dtype=torch.int64, device=model.device)
    with attention_installed(model):
        for start in range(0, first, length):
            logits = decoder(ids[:, start : min(start + length, first)])
        for at in range(first, task.tokens):
            made = logits.argmax(-1)
            right, asked = right + (answer[:, at] & (made == ids[:, at])).sum(), asked + answer[:, at].sum()
            logits = decoder(made.where(answer[:, at], ids[:, at])[:, None])
    return float(right / asked)


def draw(result: dict, path: Path) -> None:
    """Loss curves of answers and text, and the recall of each model under each attention."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3, width_ratios=(1, 1, 1.1))
    for axes, what in zip(panels, ("answers", "text")):
        for name, curve in result["curves"].items():
            axes.plot([row["step"] for row in curve], [row[what] for row in curve], label=name)
        axes.set(xlabel="step", ylabel="nats a token", title=f"held-out loss of {what}")
        for tokens, end in result["stages"]:
            axes.axvline(end, color="lightgrey", linewidth=0.8)
            axes.text(end, 0.97, f"{tokens:,} tokens", rotation=90, ha="right", va="top", fontsize=7, color="grey",
                      transform=axes.get_xaxis_transform())  # fmt: skip
    panels[0].axhline(math.log(result["task"]["values"]), color="grey", linestyle=":")
    panels[0].text(0, math.log(result["task"]["values"]), " a guess", va="bottom", fontsize=8, color="grey")
    figure.legend(*panels[1].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    table, axes = result["recall"], panels[2]
    ways = list(dict.fromkeys(way for row in table.values() for way in row))
    shares = [[row.get(way, math.nan) for way in ways] for row in table.values()]
    axes.imshow(shares, vmin=0, vmax=1, cmap="Blues", aspect="auto")
    for y, row in enumerate(shares):
        for x, share in enumerate(row):
            if not math.isnan(share):
                axes.text(x, y, f"{share:.1%}", ha="center", va="center", color="white" if share > 0.6 else "black")
    axes.set(xlabel="generated with", ylabel="trained with", title="pairs recalled")
    axes.set_xticks(range(len(ways)), ways, rotation=20)
    axes.set_yticks(range(len(table)), list(table))
    figure.savefig(path)


def kinds(chunk_tokens: int, page_tokens: int, top_k: int, recent: int) -> Iterator[tuple[str, ChunkConfig]]:
    dense = ChunkConfig(chunk_tokens=chunk_tokens, page_tokens=page_tokens, check_recompute=False)
    sparse = replace(dense, attention="sparse", top_k_pages=top_k, recent_pages=recent, sink_pages=0)
    yield "dense", dense
    yield "sparse, mean", sparse
    yield "sparse, minmax", replace(sparse, scorer="minmax")
    yield "recent", replace(sparse, top_k_pages=0, recent_pages=top_k + recent)


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/recall"))
    parser.add_argument("--small", action="store_true", help="other defaults, for a CPU")
    parser.add_argument("--only", nargs="*", help="kinds to train")
    sizes = {  # large, small
        "tokens": (4096, 1024), "chunk-tokens": (2048, 256), "page-tokens": (64, 32), "top-k": (4, 4), "recent": (2, 2),
        "width": (256, 64), "layers": (4, 2), "head-dim": (64, 32), "pairs": (32, 16), "keys": (32, 16),
        "values": (32, 16), "rows": (16, 4), "steps": (500, 500), "warmup": (40, 40), "every": (20, 20),
    }  # fmt: skip
    for name in sizes:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--long-only", action="store_true", help="the full length from the first step on")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    for name, choice in sizes.items():
        name = name.replace("-", "_")
        if getattr(given, name) is None:
            setattr(given, name, choice[given.small])
    given.stages, end = [], 0.0
    for share, each in ((1.0, None),) if given.long_only else STAGES:
        end += share * given.steps
        given.stages.append((given.tokens if each is None else min(each * given.pairs, given.tokens), math.ceil(end)))
    return given


def main(arguments: list[str] | None = None) -> int:
    given = options(arguments)
    device, text = torch.device(given.device), source_text()
    task = Task(given.tokens, given.pairs, given.keys, given.values)
    ways = dict(kinds(given.chunk_tokens, given.page_tokens, given.top_k, given.recent))
    settings = {k: v for k, v in vars(given).items() if k not in ("out", "only", "stages")}
    result: dict = {
        "task": vars(task),
        "settings": settings,
        "stages": given.stages,
        "torch": torch.__version__,
        "curves": {},
        "recall": {},
    }
    result["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.only or ways:
        print(name, flush=True)
        model = make_model(task, given.width, given.layers, given.head_dim).to(device)
        result["curves"][name] = train(model, task, text, ways[name], given)
        others = ways if name == "dense" else {way: ways[way] for way in ("dense", name)}
        result["recall"][name] = {way: recall(model, task, text, c, 4 * given.rows) for way, c in others.items()}
        print("  recalled  " + "  ".join(f"{way} {share:.1%}" for way, share in result["recall"][name].items()))
        (given.out / "recall.json").write_text(json.dumps(result, indent=1) + "\n")  # what there is, if it is cut off
        draw(result, given.out / "recall.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
