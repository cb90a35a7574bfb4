"""Train a stack of MLP blocks with its saved activations in host memory, and show what that does to GPU memory.

On a machine without a GPU the arena is ordinary memory; the losses are compared all the same.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from offload import Offloader, PinnedArena, saved_on_host

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, WIDTH, BLOCKS = (16384, 2048, 16) if DEVICE == "cuda" else (512, 128, 8)
MIB = 2**20


def mlp_stack() -> torch.nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.GELU(), torch.nn.Linear(2 * WIDTH, WIDTH))
        for _ in range(BLOCKS)
    ]
    return torch.nn.Sequential(*blocks).to(DEVICE)


def train(arena: PinnedArena | None, steps: int = 3) -> list[float]:
    model = mlp_stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    losses, on_host = [], 0
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        with nullcontext() if arena is None else saved_on_host(Offloader(DEVICE), arena):
            loss = (model(x) - x).square().mean()
        on_host = 0 if arena is None else arena.used_bytes
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"activations on the {'device' if arena is None else 'host'}:")
    print("  losses", " ".join(f"{loss:.6f}" for loss in losses))
    print(f"  host memory before backward {on_host / MIB:.1f} MiB")
    if DEVICE == "cuda":
        print(f"  GPU memory peak {torch.cuda.max_memory_allocated() / MIB:.0f} MiB")
    return losses


def main() -> None:
    # In each block the two linear layers and the activation save their inputs; the loss saves one more.
    activation_bytes = 4 * ROWS * WIDTH * (5 * BLOCKS + 1)
    with PinnedArena(activation_bytes) as arena:
        print(f"arena of {arena.nbytes / MIB:.1f} MiB on {DEVICE}'s host, {'pinned' if arena.pinned else 'pageable'}")
        if train(None) != train(arena):
            raise SystemExit("the losses differ")


if __name__ == "__main__":
    main()
