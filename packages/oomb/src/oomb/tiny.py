"""A model and a tokenizer made on the spot: what `oomb train` uses where none is named."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

END_OF_TEXT = "<|endoftext|>"
BYTES = 256


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer whose id for a byte is the byte's own value; id 256 ends a document.

    Returns: a tokenizer that decodes what it encoded for any text. Saved beside a Qwen2 model it is loaded by
        AutoTokenizer as a Qwen2Tokenizer: the same ids, after Unicode's composed form (NFC).
    """
    backend = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(_byte_alphabet())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def tiny_model(context: int, seed: int) -> Qwen2ForCausalLM:
    """A Qwen2 of about 0.1 M parameters over single bytes, small enough for two CPU cores at long contexts."""
    config = Qwen2Config(
        vocab_size=BYTES + 1,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=BYTES,
        pad_token_id=BYTES,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
        # Bytes that start far apart, and a head of its own: what lets a few steps show a falling loss.
        torch.nn.init.normal_(model.model.embed_tokens.weight)
    return model


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    unprintable = [byte for byte in range(BYTES) if byte not in printable]
    return [chr(byte) if byte in printable else chr(BYTES + unprintable.index(byte)) for byte in range(BYTES)]
