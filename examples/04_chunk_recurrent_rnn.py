"""Train a recurrent model on 4,096 bytes at a time while autograd holds the graph of 256 of them.

The model is linear attention with a decay: its whole past is one matrix per layer, which the chunks hand on. The
gradient is that of the full sequence (no truncation), which the first lines check against a single graph.
"""

import argparse
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chunk_recur import State, chunk_recurrent, reference

TOKENS, CHUNK, WIDTH, LAYERS, STEPS = 4096, 256, 48, 2, 12


class Layer(nn.Module):
    """out_i = q_i · Σ_{j <= i} decay^(i - j) k_j v_jᵀ, one chunk at once. x [C, D], memory [D, D]."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.decay = nn.Parameter(torch.tensor(3.0))
        self.start = nn.Parameter(torch.zeros(width, width))  # a learned initial state

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        log_decay = F.logsigmoid(self.decay)
        i = torch.arange(len(x))
        within = torch.exp(log_decay * (i[:, None] - i).clamp_min(0)).tril()
        out = (q @ k.T * within) @ v + torch.exp(log_decay * (i[:, None] + 1)) * (q @ memory)
        rest = torch.exp(log_decay * (len(x) - 1 - i))[:, None]
        memory = torch.exp(log_decay * len(x)) * memory + (k * rest).T @ v
        return x + self.out(F.layer_norm(out, out.shape[-1:])), memory


class Model(nn.Module):
    """Bytes in, the next byte's logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(Layer(WIDTH) for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def state(self) -> State:
        return State(carried=[layer.start for layer in self.layers])

    def step(self, index: int, chunk: Tensor, carried: list[Tensor], phase: str) -> tuple[Tensor, list[Tensor]]:
        """What chunk_recur calls: twice for every chunk but the last."""
        x, after = self.embed(chunk[:-1]), []
        for layer, memory in zip(self.layers, carried):
            x, memory = layer(x, memory)
            after.append(memory)
        return F.cross_entropy(self.head(x), chunk[1:], reduction="sum") / TOKENS, after


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """The most bytes that autograd held for backward at one moment."""

    def __init__(self) -> None:
        super().__init__(self._pack, lambda held: held.tensor)
        self.now = self.peak = 0

    def _pack(self, tensor: Tensor) -> Any:
        meter, size = self, tensor.numel() * tensor.element_size()

        class Held:
            def __init__(self) -> None:
                self.tensor = tensor.detach()
                meter.now += size
                meter.peak = max(meter.peak, meter.now)

            def __del__(self) -> None:
                meter.now -= size

        return Held()


def chunks_of(text: Tensor, start: int) -> list[Tensor]:
    """Chunks of bytes, each with the byte after it, which is its last label."""
    return [text[i : i + CHUNK + 1] for i in range(start, start + TOKENS, CHUNK)]


def main() -> None:
    torch.manual_seed(0)
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    model = Model()

    grads, peaks = [], []
    for function in (reference.chunk_recurrent, chunk_recurrent):
        saved = SavedBytes()
        with saved:
            function(model.step, chunks_of(text, 0), model.state(), params=model.parameters()).backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        peaks.append(saved.peak / 2**20)
        model.zero_grad()
    error = float((grads[1] - grads[0]).norm() / grads[0].norm())
    print(f"{TOKENS:,} tokens: activations {peaks[0]:.1f} MiB in one graph, {peaks[1]:.1f} MiB in chunks of {CHUNK}")
    print(f"relative difference of the gradients: {error:.1e}")
    assert error < 1e-4 and peaks[1] < peaks[0] / 8

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        start = step * TOKENS % (len(text) - TOKENS - 1)
        loss = chunk_recurrent(model.step, chunks_of(text, start), model.state(), params=model.parameters())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step + 1:2d}  loss {losses[-1]:.3f}")
    assert losses[-1] < losses[0] - 1.5


if __name__ == "__main__":
    main()
