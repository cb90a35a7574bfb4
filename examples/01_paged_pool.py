"""Train through a paged KV cache: one attention layer over a long sequence, block by block, forward and back.

The whole sequence's attention matrix never exists; the gradients equal those of dense attention.
"""

import torch

from paged_kv import PagedKV, PagePool, paged_attention

TOKENS, BLOCK, HEADS, KV_HEADS, DIM, PAGE = 2048, 300, 8, 2, 32, 64
SCALE = DIM**-0.5


def blocks():
    return [(start, min(start + BLOCK, TOKENS)) for start in range(0, TOKENS, BLOCK)]


def paged(x, weights, target):
    """Gradients of the weights, walking the blocks back over a page pool."""
    pool = PagePool(
        layers=1,
        slots=-(-TOKENS // PAGE),
        page_tokens=PAGE,
        kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=x.dtype,
        device="cpu",
    )
    cache = PagedKV(pool, batch=1)
    wq, wk, wv = weights

    with torch.no_grad():  # fill: only keys and values are kept
        for start, end in blocks():
            cache.extend(end - start)
            cache.append(0, heads(x[:, start:end] @ wk), heads(x[:, start:end] @ wv))
    print(f"filled {TOKENS} tokens into {pool.table.total_pages - pool.table.free_pages} pages of {PAGE}")

    loss = 0.0
    for start, end in reversed(blocks()):  # walk back: one block's activations at a time
        if start < cache.lengths[0]:  # the last block is open already
            cache.rewind(start)
        part = x[:, start:end]
        out = paged_attention(heads(part @ wq), heads(part @ wk), heads(part @ wv), cache, 0, scale=SCALE)
        block_loss = ((out.flatten(2) - target[:, start:end]) ** 2).mean() * ((end - start) / TOKENS)
        block_loss.backward()
        loss += block_loss.item()
    cache.release()
    print(f"walked back; {pool.table.free_pages} of {pool.table.total_pages} pages free again")
    return loss


def dense(x, weights, target):
    wq, wk, wv = weights
    q, k, v = (heads(x @ w).transpose(1, 2) for w in (wq, wk, wv))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True)
    loss = ((out.transpose(1, 2).flatten(2) - target) ** 2).mean()
    loss.backward()
    return loss.item()


def heads(x):
    return x.unflatten(-1, (-1, DIM))


def main():
    torch.manual_seed(0)
    x = torch.randn(1, TOKENS, 64, dtype=torch.float64)
    target = torch.randn(1, TOKENS, HEADS * DIM, dtype=torch.float64)
    widths = (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)
    weights = [torch.randn(64, n, dtype=torch.float64).mul_(0.2).requires_grad_() for n in widths]

    loss = paged(x, weights, target)
    ours = [w.grad for w in weights]
    for w in weights:
        w.grad = None
    true = dense(x, weights, target)
    print(f"loss {loss:.12f}, dense {true:.12f}")
    for name, a, w in zip("qkv", ours, weights):
        error = ((a - w.grad).norm() / w.grad.norm()).item()
        print(f"gradient of w{name}: relative distance from dense {error:.1e}")
        assert error < 1e-10


if __name__ == "__main__":
    main()
