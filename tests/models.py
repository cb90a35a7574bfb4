"""Tiny models of the architectures the trainer promises to be exact for, with random weights that make attention
matter.
"""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 61
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}


def configs() -> dict[str, PretrainedConfig]:
    """One fresh config a name."""
    return {
        "qwen2": Qwen2Config(**COMMON),
        "qwen2_window": Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=9, max_window_layers=1),
        "qwen3": Qwen3Config(**COMMON),
        "llama": LlamaConfig(**COMMON),
        "llama_tied": LlamaConfig(**{**COMMON, "tie_word_embeddings": True}),
        "gpt_oss": GptOssConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=9),
        "qwen3_moe": Qwen3MoeConfig(**COMMON, **MOE),
        "qwen3_moe_balanced": Qwen3MoeConfig(**COMMON, **MOE, output_router_logits=True, router_aux_loss_coef=0.3),
    }


def build(config: PretrainedConfig, *, dtype: torch.dtype = torch.float64, seed: int = 0, device: str = "cpu"):
    """A model in training mode; weights large enough that each part of it shows in the gradients."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.normal_(0.0, 0.3 if "embed" in name else 1.2 * p.shape[-1] ** -0.5)
            elif "sinks" in name or "bias" in name:
                p.normal_(0.0, 0.5)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped kernels know no float64
    return model.to(device).train()
