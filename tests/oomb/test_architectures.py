"""Any causal language model of the library is either exact in chunks or refused with a reason: never silently wrong.

Tiny instances of many architectures, each against the library's own forward and loss over the whole sequence. The
bound is
that of the library's float32 softmax and loss; a state that is not carried, a mask misread or a head bypassed shows
as 1e-2
and more.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from tests.models import COMMON, VOCAB
from tests.numerics import gradient_errors, gradients, relative
from tests.oomb.test_exact import tokens
from transformers import AutoModelForCausalLM

from oomb import ChunkConfig, Unsupported, chunked_loss

MORE = {
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "d_model": 32,
    "n_positions": 512,
    "num_layers": 3,
    "ffn_dim": 48,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": 9,
    "is_decoder": True,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
}
NO_DROPOUT = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout", "residual_dropout")
NO_DROPOUT += ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "activation_dropout", "layerdrop")
NO_DROPOUT += ("router_jitter_noise", "input_jitter_noise")

# Each must be exact. The comments say what is particular.
EXACT = [
    "Afmoe",  # views what attention returns
    "Apertus",
    "Arcee",
    "BioGpt",  # learned positions
    "BitNet",
    "Cohere",  # logit scale
    "Cohere2",  # windows without rotary layers between
    "Ernie4_5",
    "Exaone4",
    "Gemma",
    "Gemma3Text",  # two rotary embeddings
    "Gemma3nText",  # layers hand on four hidden states a token
    "Gemma4Text",  # head dims that differ from layer to layer
    "Glm4Moe",
    "GPT2",  # learned positions
    "GPTNeoX",  # parallel blocks
    "GPTBigCode",  # one KV head
    "Granite",  # multipliers
    "GraniteMoe",
    "Helium",
    "HunYuanDenseV1",
    "JetMoe",  # views what attention returns
    "Ministral",
    "Mistral",
    "Mixtral",
    "NanoChat",
    "Olmo2",
    "Olmo3",
    "Olmoe",
    "OPT",
    "Phi",  # partial rotary
    "Phi3",
    "Qwen2Moe",
    "SeedOss",
    "SmolLM3",  # layers without positions
    "Starcoder2",
]


def build(name: str):
    """A tiny float64 model of an architecture, whatever its config calls its sizes."""
    kind = getattr(transformers, f"{name}Config")
    known = kind()  # a setting of another architecture is kept all the same, and generation believes it
    settings = {
        key: value
        for key, value in (COMMON | MORE | dict.fromkeys(NO_DROPOUT, 0.0)).items()
        if key in dir(known) or key in known.attribute_map
    }
    for without in ((), ("head_dim",), ("sliding_window",), ("num_layers",), ("is_decoder",)):
        try:
            config = kind(**{key: value for key, value in settings.items() if key not in without})
            break
        except Exception:
            continue
    else:
        pytest.fail(f"no tiny {name} can be configured")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double()
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            if p.ndim > 1:
                p.normal_(0, 0.3 if "emb" in parameter_name or "wte" in parameter_name else 1.2 * p.shape[-1] ** -0.5)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize("name", EXACT)
def test_exact(name):
    model, ids = build(name), tokens(2, 25)
    model.eval()  # what has noise of its own in training (routers) has none here
    expected = model(input_ids=ids, labels=ids, use_cache=False).loss
    expected.backward()
    dense = gradients(model)
    loss = chunked_loss(model, ids, config=ChunkConfig(chunk_tokens=7, page_tokens=4))
    loss.backward()
    assert relative(loss, expected) <= 1e-5
    assert gradient_errors(gradients(model), dense)[0] <= 1e-5


@pytest.mark.parametrize(
    "name", ["Gemma2", "DiffLlama", "FalconH1", "Mamba", "RecurrentGemma", "Qwen3Next", "Bloom", "Lfm3"]
)
def test_refused(name):
    if name == "Lfm3" and not hasattr(transformers, "Lfm3Config"):
        pytest.skip("Lfm3 came with a later transformers than 5.17, the oldest that is allowed")
    model = build(name)
    with pytest.raises(Unsupported):
        chunked_loss(model, torch.randint(VOCAB, (1, 25)), config=ChunkConfig(chunk_tokens=7, page_tokens=4))
    assert all(p.grad is None for p in model.parameters())
