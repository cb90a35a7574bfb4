"""How far is the sparse gradient from the dense one? A real model, real text, by budget and by how pages are scored.

    python -m benchmarks.smollm2                                   makes model and text: runs/smollm2
    python -m benchmarks.sparse_quality --out runs/sparse_quality

For each length and page the gradient of all parameters over one held-out text is taken dense, and sparse with 2 to
64 chosen pages beside one sink page and two recent ones; `error` is the norm of the difference over the dense norm.
"recent" spends the same budget on the latest pages, choosing nothing: what scoring pages must beat. "dense, other
chunks" is the dense gradient again, rounded otherwise: what no selection can beat.

`caught` is the share of attention that a block's queries pay, as plain torch computes it over the whole past, to
the pages on its list: the mean over late blocks, heads and layers. "best" are the pages that the queries of the
block pay most, all heads together; no list shared by the heads catches more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from oomb import ChunkConfig, chunked_backward
from oomb.hf import attention_installed
from sparse_pages import PageSummary, select_pages

BUDGETS = (2, 4, 8, 16, 32, 64)
SINKS, RECENT = 1, 2
RULES = ("mean", "minmax", "recent")
BLOCKS, LAYERS = 12, 6  # whose attention is looked at: late blocks, layers from first to last


def mixed(device: torch.device) -> contextlib.AbstractContextManager:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def budget(rule: str, pages: int) -> dict[str, int]:
    """What `select_pages` and ChunkConfig call it; all rules read as many pages."""
    if rule == "recent":
        return {"top_k": 0, "recent": RECENT + pages, "sinks": SINKS}
    return {"top_k": pages, "recent": RECENT, "sinks": SINKS}


def gradient(model, ids: Tensor, chunks: ChunkConfig) -> tuple[float, Tensor]:
    """The loss, and the gradient of all parameters as one vector."""
    model.zero_grad()
    with mixed(ids.device):
        loss = chunked_backward(model, ids, config=chunks)
    return float(loss), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def distance(found: Tensor, true: Tensor) -> dict[str, float]:
    cosine = torch.nn.functional.cosine_similarity(found.double(), true.double(), dim=0)
    return {"cosine": float(cosine), "error": float((found - true).norm() / true.norm())}


class Seen:
    """Dense attention that remembers the queries and keys of some layers; takes the place of a pass's context."""

    def __init__(self, layers: list[int]) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = dict.fromkeys(layers, None)  # type: ignore[arg-type]

    def attend(self, module, q: Tensor, k: Tensor, v: Tensor, *, mask, scale: float, sinks) -> Tensor:
        if module.layer_idx in self.kept:
            self.kept[module.layer_idx] = q, k
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(*heads_first, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)


def paid(q: Tensor, k: Tensor, block: int, page: int) -> Tensor:
    """The share of attention that a block's queries pay to each page, over the heads.

    Shapes: q [1, T, H, D]; k [1, T, G, D] → [block + 1]
    """
    end = (block + 1) * page
    queries = q[0, end - page : end].float().transpose(0, 1)  # [H, P, D]
    keys = k[0, :end].float().repeat_interleave(q.shape[2] // k.shape[2], 1).permute(1, 2, 0)  # [H, D, end]
    scores = queries @ keys * q.shape[3] ** -0.5
    position = torch.arange(end, device=q.device)
    scores = scores.masked_fill(position > position[end - page :, None], -torch.inf)
    return scores.softmax(-1).unflatten(-1, (-1, page)).sum(-1).mean((0, 1))


@torch.no_grad()
def attention_caught(model, ids: Tensor, page: int, budgets: tuple[int, ...]) -> dict[str, dict[int, float]]:
    layers = sorted({round(i * (model.config.num_hidden_layers - 1) / (LAYERS - 1)) for i in range(LAYERS)})
    seen, last = Seen(layers), ids.shape[1] // page - 1
    with attention_installed(model), mixed(ids.device):
        model.get_decoder()(ids, use_cache=False, oomb=seen)
    blocks = sorted({last - i * (last // 2) // BLOCKS for i in range(BLOCKS)})  # of the later half
    caught: dict[str, dict[int, list[Tensor]]] = {rule: {n: [] for n in budgets} for rule in (*RULES, "best")}
    for layer in layers:
        q, k = seen.kept.pop(layer)
        shares = {block: paid(q, k, block, page) for block in blocks}
        for rule in RULES:
            summary = PageSummary(page, "minmax" if rule == "minmax" else "mean")
            summary.append(k)
            for n in budgets:
                lists = select_pages(q, summary, past_pages=0, **budget(rule, n))[0, 0]
                for block, share in shares.items():
                    listed = lists[block][lists[block] >= 0].long()
                    caught[rule][n].append(share[listed].sum())
        for n in budgets:
            for block, share in shares.items():
                always = torch.zeros_like(share, dtype=torch.bool)
                always[:SINKS], always[max(block - RECENT + 1, 0) :] = True, True
                others = share.masked_fill(always, 0.0).topk(min(n, len(share))).values.sum()
                caught["best"][n].append(share[always].sum() + others)
    return {rule: {n: float(torch.stack(v).mean()) for n, v in by.items()} for rule, by in caught.items()}


def study(model, ids: Tensor, page: int, chunk_tokens: int, budgets: tuple[int, ...]) -> dict:
    """One text, one page length: distances of gradients, attention caught."""
    dense = ChunkConfig(chunk_tokens=chunk_tokens, page_tokens=page)
    true_loss, true = gradient(model, ids, dense)
    _, again = gradient(model, ids, replace(dense, chunk_tokens=chunk_tokens // 2))
    floor = distance(again, true)
    print(f"{ids.shape[1]:,} tokens, pages of {page}: loss {true_loss:.4f}, dense, other chunks: {floor}", flush=True)
    del again
    caught = attention_caught(model, ids, page, budgets)
    rows = []
    for rule in RULES:
        for n in budgets:
            words = budget(rule, n)
            sparse = replace(
                dense, attention="sparse", top_k_pages=words["top_k"], recent_pages=words["recent"],
                sink_pages=words["sinks"], scorer="minmax" if rule == "minmax" else "mean",
            )  # fmt: skip
            loss, found = gradient(model, ids, sparse)
            row = {"rule": rule, "pages": n, "loss": loss, **distance(found, true), "caught": caught[rule][n]}
            rows.append(row)
            print(
                "  " + "  ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{v}" for k, v in row.items()), flush=True
            )
    return {
        "tokens": ids.shape[1], "page_tokens": page, "loss": true_loss, "dense, other chunks": floor, "rows": rows,
        "best": caught["best"],
    }  # fmt: skip


def draw(result: dict, path: Path) -> None:
    """Error of the gradient and attention caught, by budget: a colour for each rule, a line style for each case."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(10, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    error, caught = figure.subplots(1, 2)
    colours = dict(zip((*RULES, "best"), ("#4c78a8", "#e45756", "#9a9a9a", "#54a24b")))
    styles = dict(zip(range(len(result["cases"])), ("-", "--", ":", "-.")))
    for number, case in enumerate(result["cases"]):
        for rule in RULES:
            rows = [row for row in case["rows"] if row["rule"] == rule]
            pages, line = [row["pages"] for row in rows], {"color": colours[rule], "linestyle": styles[number]}
            error.plot(pages, [row["error"] for row in rows], marker=".", **line)
            caught.plot(pages, [row["caught"] for row in rows], marker=".", **line)
        best = {int(n): share for n, share in case["best"].items()}
        caught.plot(list(best), list(best.values()), color=colours["best"], linestyle=styles[number])
        error.axhline(case["dense, other chunks"]["error"], color="black", linewidth=0.6, linestyle=styles[number])
    error.set(
        xlabel="chosen pages", ylabel="|sparse - dense| / |dense|", title="gradient of all parameters", yscale="log"
    )
    caught.set(xlabel="chosen pages", ylabel="share", title="attention caught")
    for axes in (error, caught):
        axes.set_xscale("log", base=2)
        axes.set_xticks(BUDGETS, map(str, BUDGETS))
        axes.grid(alpha=0.3)
    names = {"mean": "mean key", "minmax": "bounds on keys", "recent": "the latest pages", "best": "best possible"}
    handles = [Line2D([], [], color=colours[rule], label=name) for rule, name in names.items()]
    for number, case in enumerate(result["cases"]):
        label = f"{case['tokens']:,} tokens, pages of {case['page_tokens']}"
        handles.append(Line2D([], [], color="black", linestyle=styles[number], label=label))
    handles.append(Line2D([], [], color="black", linewidth=0.6, label="dense, rounded otherwise"))
    figure.legend(handles=handles, loc="outside right upper", frameon=False)
    figure.savefig(path)


def options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("runs/smollm2/run/checkpoint"))
    parser.add_argument("--text", type=Path, default=Path("runs/smollm2/text/held-out.txt"))
    parser.add_argument("--out", type=Path, default=Path("runs/sparse_quality"))
    parser.add_argument("--cases", nargs="+", default=["16384x64", "16384x128", "32768x128"], help="tokens x page")
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS)
    parser.add_argument("--chunk-tokens", type=int, default=8192)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    given, began = options(arguments), time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).to(given.device)
    cases = [tuple(map(int, case.split("x"))) for case in given.cases]
    longest = max(tokens for tokens, _ in cases)
    text = given.text.read_text(encoding="utf-8")[: longest * 8]
    ids = torch.tensor([AutoTokenizer.from_pretrained(given.model)(text, verbose=False)["input_ids"]])
    if ids.shape[1] < longest:
        raise SystemExit(f"{given.text} has {ids.shape[1]:,} tokens, {longest:,} are needed")
    device = torch.cuda.get_device_name() if given.device != "cpu" else "cpu"
    result: dict = {"model": given.model.name, "device": device, "torch": torch.__version__, "cases": []}
    given.out.mkdir(parents=True, exist_ok=True)
    for tokens, page in cases:
        piece = ids[:, :tokens].to(given.device)
        result["cases"].append(study(model, piece, page, given.chunk_tokens, tuple(given.budgets)))
        result["seconds"] = time.perf_counter() - began
        (given.out / "sparse_quality.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, given.out / "sparse_quality.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
