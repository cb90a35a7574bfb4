"""Which attention a step on a GPU runs: what the kernels of `paged_kv` take, known where there is no GPU to ask."""

from __future__ import annotations

import torch

from .config import ChunkConfig
from .probe import LayerFacts, Profile

PAGE_TOKENS = (64, 128)
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
DTYPES = {"triton": (torch.bfloat16, torch.float16, torch.float32), "cudnn": (torch.bfloat16, torch.float16)}
OTHERS = {"triton": '"reference"', "cudnn": '"triton" or "reference"'}
TILE, TILE_KEYS, TILE_QUERIES = 2**25, 4096, 64  # scores, keys and fewest queries that plain torch holds at once there


def why_plain(config: ChunkConfig, profile: Profile, *, gpu: bool) -> str | None:
    """Why attention is computed in plain torch on a GPU, or None where kernels serve.

    Raises: ValueError, in the words that attention itself would use, for a backend that was named and does not serve
    """
    if not gpu:
        return None
    if config.backend == "reference":
        return "it was asked for"
    name = "triton" if config.backend == "auto" else config.backend
    for facts in profile.layers.values():
        problem = _problem(config, name, facts)
        if problem is not None and config.backend == "auto":
            return f"no kernel serves: {problem}"
        if problem is not None:
            raise ValueError(f'paged_attention, backend "{name}": {problem}; use backend={OTHERS[name]}')
    return None


def _problem(config: ChunkConfig, name: str, facts: LayerFacts) -> str | None:
    if facts.dtype not in DTYPES[name]:
        known = [str(dtype).removeprefix("torch.") for dtype in DTYPES[name]]
        return f"expected dtype {', '.join(known[:-1])} or {known[-1]}, got {facts.dtype}"
    if facts.head_dim not in HEAD_DIMS:
        return f"expected head dim in {HEAD_DIMS}, got {facts.head_dim}"
    if name == "triton" and config.page_tokens not in PAGE_TOKENS:
        return f"expected pages of {' or '.join(map(str, PAGE_TOKENS))} tokens, got {config.page_tokens}"
    if name == "cudnn" and facts.window is not None:
        return "window is not supported"
    if name == "cudnn" and config.attention == "sparse":
        return "selected is not supported"
    return None


def plain_bytes(profile: Profile, batch: int) -> int:
    """What a tile of scores takes there, thrice: scores, their gradients, and what is computed from them."""
    heads = max(f.heads for f in profile.layers.values())
    wide = 8 if any(f.dtype == torch.float64 for f in profile.layers.values()) else 4
    return 3 * wide * max(TILE, batch * heads * TILE_KEYS * TILE_QUERIES)
