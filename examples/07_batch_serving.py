"""Serve many prompts from one small pool: parts of prompts and single tokens in one call, a common prefix stored once.

When pages run out, the youngest request gives its own back and starts again later. Every request's tokens are those
that the model gives for it alone.
"""

from collections import deque
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from paged_kv import OutOfPages, PagedKV, PagePool, paged_attention

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, DIM, PAGE = 97, 64, 2, 4, 2, 16, 16


@dataclass(eq=False)
class Request:
    prompt: list[int]
    new: int  # tokens wanted
    sequence: int = -1
    pending: list[int] = field(default_factory=list)  # tokens the model has yet to see
    out: list[int] = field(default_factory=list)


# The loop: admit, take what fits the step, run it, read the tokens. Everything else in this file is the model.


def serve(model, kv, prefix, requests, budget=48, most=8):
    """Fill every request's `out`. A step runs at most `budget` tokens, those of running answers first."""
    base = kv.add()
    step(model, kv, {base: prefix})
    waiting, running = deque(requests), []
    while waiting or running:
        while waiting and len(running) < most:
            request = waiting.popleft()
            request.sequence = kv.fork(base)  # the prefix's pages, none of its own
            request.pending, request.out = list(request.prompt), []
            running.append(request)
        batch, room = {}, budget
        for request in sorted(running, key=lambda r: len(r.pending)):
            if room and request.pending:
                batch[request] = request.pending[:room]
                room -= len(batch[request])
        try:
            logits = step(model, kv, {r.sequence: tokens for r, tokens in batch.items()})
        except OutOfPages:  # nothing was changed
            if len(running) == 1:
                raise  # it does not fit alone
            youngest = running.pop()
            kv.free(youngest.sequence)
            waiting.appendleft(youngest)
            most = len(running)
            continue
        for (request, tokens), row in zip(batch.items(), logits):
            request.pending = request.pending[len(tokens) :]
            if request.pending:
                continue  # the prompt goes on in the next step
            request.out.append(int(row.argmax()))
            request.pending = request.out[-1:]
            if len(request.out) == request.new:
                kv.free(request.sequence)
                running.remove(request)
    kv.free(base)


def step(model, kv, batch):
    """One pass over a mixed batch {sequence: tokens}; logits after the last token of each."""
    kv.extend({sequence: len(tokens) for sequence, tokens in batch.items()})
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(kv.lengths, kv.tokens)])

    def attend(layer, q, k, v):
        kv.append(layer, k, v)
        return paged_attention(q, k, v, kv, layer, scale=DIM**-0.5)

    hidden = model(torch.tensor([t for tokens in batch.values() for t in tokens]), positions, attend)
    return model.logits(hidden[torch.tensor(kv.tokens).cumsum(0) - 1])


class Model:
    """A decoder with random weights, over tokens [T] at their positions."""

    def __init__(self):
        draw = lambda *shape: torch.randn(shape, dtype=torch.float64) / shape[-2] ** 0.5  # noqa: E731
        self.embedding = torch.randn(VOCAB, WIDTH, dtype=torch.float64)
        self.qkv = [draw(WIDTH, (HEADS + 2 * KV_HEADS) * DIM) for _ in range(LAYERS)]
        self.out = [draw(HEADS * DIM, WIDTH) for _ in range(LAYERS)]
        self.frequencies = 10.0 ** -torch.linspace(0, 3, WIDTH // 2, dtype=torch.float64)

    def __call__(self, tokens, positions, attend):
        angles = positions[:, None] * self.frequencies
        x = self.embedding[tokens] + torch.cat((angles.sin(), angles.cos()), 1)
        for layer in range(LAYERS):
            rows = (F.layer_norm(x, (WIDTH,)) @ self.qkv[layer]).unflatten(1, (-1, DIM))
            x = x + attend(layer, *rows.split((HEADS, KV_HEADS, KV_HEADS), 1)).flatten(1) @ self.out[layer]
        return x

    def logits(self, hidden):
        return F.layer_norm(hidden, (WIDTH,)) @ self.embedding.T


def alone(model, tokens, new):
    """The same answer without a cache: the whole sequence again for every token."""

    def attend(layer, q, k, v):
        heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    tokens = list(tokens)
    for _ in range(new):
        hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), attend)
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[-new:]


@torch.no_grad()
def main():
    torch.manual_seed(0)
    model = Model()
    pool = PagePool(
        layers=LAYERS, slots=20, page_tokens=PAGE, kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.float64, device="cpu"
    )  # fmt: skip
    kv = PagedKV(pool)
    prefix = torch.randint(VOCAB, (70,)).tolist()
    requests = [Request(torch.randint(VOCAB, (n,)).tolist(), new=12) for n in (3, 40, 90, 1, 17, 5, 64, 33, 8, 25)]
    serve(model, kv, prefix, requests)
    for request in requests:
        assert request.out == alone(model, prefix + request.prompt, request.new)
    total = sum(len(prefix) + len(r.prompt) + r.new for r in requests)
    room = pool.table.total_pages * PAGE
    print(f"{len(requests)} answers over {total} tokens from a pool of {room}, equal to those of each prompt alone")
    print(f"{pool.table.free_pages} of {pool.table.total_pages} pages free again")


if __name__ == "__main__":
    main()
