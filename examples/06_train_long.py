"""A Hugging Face model on a sequence of 2,048 tokens, sixteen times its chunk.

`chunked_loss` is one scalar that any training loop can use. First its gradient is compared with that of the library's
own forward pass over the whole sequence; then `chunked_backward` trains, and the model generates as it always did.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from oomb import ChunkConfig, chunked_backward, chunked_loss

TOKENS, STEPS = 2048, 10
CONFIG = ChunkConfig(chunk_tokens=128, page_tokens=32)


def gradient(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    """All parameters' gradients as one vector."""
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def main() -> None:
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=TOKENS, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = Qwen2ForCausalLM(shape)
    source = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    ids = text[None, :TOKENS]

    whole = gradient(model, model(input_ids=ids, labels=ids).loss)
    chunked = gradient(model, chunked_loss(model, ids, config=CONFIG))
    error = float((chunked - whole).norm() / whole.norm())
    print(f"gradient of {TOKENS:,} tokens in chunks of {CONFIG.chunk_tokens}: {error:.1e} from the whole (float32)")
    assert error < 1e-4

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        start = step * TOKENS
        losses.append(float(chunked_backward(model, text[None, start : start + TOKENS], config=CONFIG)))
        optimizer.step()
        print(f"step {step}  loss {losses[-1]:.3f}")
    assert losses[-1] < losses[0] - 1

    written = model.generate(ids[:, :64], attention_mask=torch.ones(1, 64), max_new_tokens=24, do_sample=True)
    print("it goes on:", bytes(written[0, 64:].tolist()))


if __name__ == "__main__":
    main()
