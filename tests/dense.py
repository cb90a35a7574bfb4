"""The dense oracle: a Hugging Face model over the whole sequence at once, with attention and loss of our own.

The library's eager attention and loss compute in float32 even for float64 models, so neither is used.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AttentionInterface

NAME = "dense_oracle"


def attention(module, query, key, value, attention_mask=None, *, scaling, s_aux=None, documents=None, **_):
    tokens = query.shape[2]
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    position = torch.arange(tokens, device=query.device)
    behind = position[:, None] - position
    seen = behind >= 0
    window = window_of(module)
    if window is not None:
        seen = seen & (behind < window)
    seen = seen[None]
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None, :])
    scores = (query @ key.transpose(-1, -2)) * scaling
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., :tokens]
    return (weights @ value).transpose(1, 2).contiguous(), None


def window_of(module) -> int | None:
    """The window of a layer, read off the config as its documentation has it."""
    types = getattr(module.config, "layer_types", None)
    sliding = types is not None and types[module.layer_idx] == "sliding_attention"
    return module.config.sliding_window if sliding else None


AttentionInterface.register(NAME, attention)


def dense_loss(
    model,
    ids: Tensor,
    *,
    labels: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    document_ids: Tensor | None = None,
    num_items: float | None = None,
    token_loss=None,
) -> Tensor:
    """The loss of the whole sequence in one graph, in the model's own precision."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    before = base.config._attn_implementation
    base.set_attn_implementation(NAME)
    try:
        router = bool(getattr(base.config, "output_router_logits", False))
        more = {"output_router_logits": True} if router else {}
        if position_ids is None:
            position_ids = torch.arange(ids.shape[1], device=ids.device)[None]
            if document_ids is not None:
                position_ids = torch.cat([restart(row)[None] for row in document_ids])
        output = base.model(input_ids=ids, position_ids=position_ids, use_cache=False, documents=document_ids, **more)
        logits = base.lm_head(output.last_hidden_state)
    finally:
        base.set_attn_implementation(before)
    if labels is None:
        labels = ids if attention_mask is None else ids.masked_fill(attention_mask == 0, -100)
    targets = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
    if document_ids is not None:
        crossing = document_ids[:, 1:] != document_ids[:, :-1]
        targets[:, :-1][crossing] = -100
    valid = targets != -100
    if token_loss is None:
        losses = -logits[valid].log_softmax(-1).gather(-1, targets[valid][:, None])[:, 0]
    else:
        losses = token_loss(logits[valid], targets[valid])
    loss = losses.sum() / (int(valid.sum()) if num_items is None else num_items)
    if router:
        loss = loss + base.router_aux_loss_coef * balance(
            output.router_logits, base.num_experts_per_tok, attention_mask
        )
    return loss


def restart(document_ids: Tensor) -> Tensor:
    """Positions that count from zero in each document. Shapes: [T] -> [T]"""
    positions, count = [], 0
    for i in range(len(document_ids)):
        count = count + 1 if i and document_ids[i] == document_ids[i - 1] else 0
        positions.append(count)
    return torch.tensor(positions, device=document_ids.device)


def balance(router_logits, top_k: int, attention_mask: Tensor | None) -> Tensor:
    """The Switch Transformer loss over all layers and real tokens, written as in the paper (arXiv 2101.03961)."""
    probability = torch.cat([layer.softmax(-1) for layer in router_logits])
    experts = probability.shape[-1]
    real = torch.ones(len(probability), dtype=torch.bool, device=probability.device)
    if attention_mask is not None:
        real = (attention_mask.flatten() != 0).repeat(len(router_logits))
    probability = probability[real]
    chosen = torch.zeros_like(probability).scatter(-1, probability.topk(top_k, -1).indices, 1.0).detach()
    return experts * (chosen.mean(0) * probability.mean(0)).sum()
