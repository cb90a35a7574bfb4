"""A pipeline of one's own, put together from parts: no oomb, no transformers.

A small transformer written by hand learns this file, byte by byte. `chunk_recur` runs it over chunks of 128 bytes and
walks back; `paged_kv` holds the past. What connects the two are the twenty lines of `PagedPast`. First the gradient is
compared with that of the whole sequence at once; after training the model writes a few bytes, with pages as its cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chunk_recur import Phase, State, chunk_recurrent, chunk_recurrent_backward
from paged_kv import PagedKV, PagePool, paged_attention

LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH = 2, 4, 2, 16, 64
CONTEXT, CHUNK, PAGE, STEPS = 512, 128, 32, 40

# How a layer attends: (layer, q [B, C, H, D], k, v [B, C, G, D]) -> [B, C, H, D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    """One decoder layer; how it attends is handed in."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, layer: int, attend: Attend) -> Tensor:
        q, k, v = (
            self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM)).split([HEADS, KV_HEADS, KV_HEADS], dim=2)
        )  # [B, C, heads, D], token-major as the pages are
        x = x + self.out(attend(layer, q, k, v).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(2 * CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        for table in (self.bytes, self.positions):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, ids: Tensor, start: int, attend: Attend) -> Tensor:
        x = self.bytes(ids) + self.positions(torch.arange(start, start + ids.shape[1]))
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, attend)
        return self.norm(x) @ self.bytes.weight.T


class PagedPast:
    """A `ChunkStore` over pages: forward it grows by a chunk, walking back it shrinks by one."""

    def __init__(self, kv: PagedKV, chunks: list[Tensor]) -> None:
        self.kv, self.chunks = kv, chunks

    def open(self, index: int, phase: Phase) -> None:
        if phase == "fill" or index == len(self.chunks) - 1:  # the last chunk runs once, and walks at once
            self.kv.extend(self.chunks[index].shape[1])
        else:
            self.kv.rewind(index * CHUNK)

    def close(self, index: int, phase: Phase) -> None:
        pass  # pages are freed when the chunk before them is reopened

    def abort(self) -> None:
        self.kv.release()


def over_pages(kv: PagedKV, store: bool) -> Attend:
    """Attention over the past in the pages and the chunk's own keys; a fill leaves its own in the pages."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if store:
            kv.append(layer, k, v)
        return paged_attention(q, k, v, kv, layer, scale=HEAD_DIM**-0.5, backend="reference")

    return attend


def dense(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain causal attention, to compare with."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def new_cache(dtype: torch.dtype, tokens: int) -> PagedKV:
    pool = PagePool(
        layers=LAYERS, slots=-(-tokens // PAGE), page_tokens=PAGE, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype,
        device="cpu", grad_dtype=dtype,
    )  # fmt: skip
    return PagedKV(pool, batch=1)


def pieces(model: Model, ids: Tensor, kv: PagedKV):
    """What chunk_recur wants: a step, the chunks, the state."""
    targets = F.pad(ids[:, 1:], (0, 1), value=-100)
    chunks = list(ids.split(CHUNK, dim=1))

    def step(index: int, chunk: Tensor, carried: tuple, phase: Phase) -> tuple[Tensor, tuple]:
        logits = model(chunk, index * CHUNK, over_pages(kv, store=phase == "fill"))
        wanted = targets[:, index * CHUNK : index * CHUNK + chunk.shape[1]]
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") / (ids.numel() - 1), carried

    return step, chunks, State(stores=(PagedPast(kv, chunks),))


def compare(ids: Tensor) -> float:
    """Relative distance between the chunked gradient and the dense one, in float64, over all parameters."""
    model = Model().double()
    loss = F.cross_entropy(model(ids, 0, dense)[0, :-1], ids[0, 1:])
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    parts = pieces(model, ids, new_cache(torch.float64, CONTEXT))
    chunk_recurrent(*parts, params=model.parameters()).backward()
    got = torch.cat([p.grad.flatten() for p in model.parameters()])
    return float((got - wanted).norm() / wanted.norm())


@torch.no_grad()
def continue_text(model: Model, ids: Tensor, count: int) -> bytes:
    """Let the model go on, one byte at a time, with the pages as its cache."""
    kv, written = new_cache(torch.float32, ids.shape[1] + count), []
    for _ in range(count):
        kv.extend(ids.shape[1])
        logits = model(ids, kv.lengths[0], over_pages(kv, store=True))[:, -1]
        ids = torch.multinomial(logits.softmax(-1), 1)
        written.append(int(ids))
    return bytes(written)


def main() -> None:
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    error = compare(text[None, : CONTEXT - 20])
    print(f"gradient, {len(text[: CONTEXT - 20])} bytes in chunks of {CHUNK}: {error:.1e} from the dense one (float64)")
    assert error < 1e-10

    model, kv = Model(), new_cache(torch.float32, CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        start = int(torch.randint(0, len(text) - CONTEXT, ()))
        optimizer.zero_grad()
        loss = chunk_recurrent_backward(*pieces(model, text[None, start : start + CONTEXT], kv))
        optimizer.step()
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:2d}  loss {float(loss):.3f}")
    assert float(loss) < 3.4
    print("it goes on:", continue_text(model, text[None, :256], 32))


if __name__ == "__main__":
    main()
