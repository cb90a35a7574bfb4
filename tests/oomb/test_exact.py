"""The trainer's promise: the gradients of a chunked step are those of the dense one, for all parameters of a model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dense import dense_loss
from tests.models import VOCAB, build, configs
from tests.numerics import gradient_errors, gradients, relative

from oomb import ChunkConfig, chunked_backward, chunked_loss

LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5}
NAMES = sorted(configs())


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def check(model, ids, config, *, reference=None, dense_arguments=None, limit=1e-10, **arguments):
    """Both entry points against the dense oracle; `reference` is a wider copy of the model to measure against."""
    reference = model if reference is None else reference
    expected = dense_loss(reference, ids, **(arguments if dense_arguments is None else dense_arguments))
    expected.backward()
    dense = gradients(reference)
    loss = chunked_loss(model, ids, config=config, **arguments)
    loss.backward()
    both = [(loss, gradients(model))]
    detached = chunked_backward(model, ids, config=config, **arguments)
    assert not detached.requires_grad
    both.append((detached, gradients(model)))
    for value, ours in both:
        assert relative(value, expected) <= limit
        total, worst = gradient_errors(ours, dense)
        assert total <= limit, total
        assert worst <= limit, worst


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("chunk", "page"), [(1, 4), (8, 4), (7, 5), (13, 16), (29, 8), (64, 8)])
def test_every_architecture_and_cut(name, chunk, page):
    model = build(configs()[name])
    check(model, tokens(1, 29), ChunkConfig(chunk_tokens=chunk, page_tokens=page))


@pytest.mark.parametrize("name", NAMES)
def test_float32(name):
    model, wide = build(configs()[name], dtype=torch.float32), build(configs()[name])
    wide.load_state_dict(model.state_dict())
    check(model, tokens(1, 29), ChunkConfig(chunk_tokens=8, page_tokens=4), reference=wide, limit=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_batch_with_right_padding(name):
    model = build(configs()[name])
    mask = (torch.arange(23) < torch.tensor([23, 9, 16])[:, None]).long()
    check(model, tokens(3, 23), ChunkConfig(chunk_tokens=6, page_tokens=4), attention_mask=mask)


@pytest.mark.parametrize("name", ["qwen2_window", "gpt_oss", "qwen3_moe", "llama_tied"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(name, reentrant):
    model = build(configs()[name])
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    plain = build(configs()[name])
    check(model, tokens(2, 21), ChunkConfig(chunk_tokens=5, page_tokens=4), reference=plain)


# the balance loss is over all tokens together, not a sum over documents: test_anything_goes_together packs that model
@pytest.mark.parametrize("name", [name for name in NAMES if name != "qwen3_moe_balanced"])
def test_packed_documents_are_separate_runs(name):
    """Against running each document by itself: no oracle for packing is needed."""
    model = build(configs()[name])
    ids, lengths = tokens(1, 31), [4, 15, 1, 11]
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    items = sum(lengths) - len(lengths)
    expected = sum(dense_loss(model, part, num_items=items) for part in ids.split(lengths, 1) if part.shape[1] > 1)
    expected.backward()
    dense = gradients(model)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    for given_as in ({"document_ids": documents}, {"position_ids": positions}):
        loss = chunked_loss(model, ids, config=ChunkConfig(chunk_tokens=7, page_tokens=4), **given_as)
        loss.backward()
        assert relative(loss, expected) <= 1e-10
        assert max(gradient_errors(gradients(model), dense)) <= 1e-10


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
    },
}


@pytest.mark.parametrize("rope", sorted(ROPES))
def test_rope_types(rope):
    config = configs()["llama"]
    config.rope_parameters = dict(ROPES[rope])
    config.max_position_embeddings = 16
    model = build(config)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    ids = tokens(2, 37)
    ours = chunked_loss(model, ids, config=ChunkConfig(chunk_tokens=8, page_tokens=4))
    after = dict(model.named_buffers())
    assert all(torch.equal(before[name], after[name]) for name in before), "the model's own rotary state was changed"
    ours.backward()
    grads = gradients(model)
    expected = dense_loss(model, ids)  # the library's own rotary module sees the whole sequence here
    expected.backward()
    assert relative(ours, expected) <= 1e-10
    assert max(gradient_errors(grads, gradients(model))) <= 1e-10


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_anything_goes_together(data):
    """Shapes, cuts, pages, windows, labels, documents, budgets and kept outputs, drawn at random."""
    draw = data.draw
    name = draw(st.sampled_from(NAMES))
    config = configs()[name]
    if name in ("qwen2_window", "gpt_oss"):
        config.sliding_window = draw(st.integers(1, 40))
    if draw(st.booleans()):
        config.num_key_value_heads = draw(st.sampled_from([1, 4]))
    model = build(config, seed=draw(st.integers(0, 3)))
    batch, length = draw(st.integers(1, 3)), draw(st.integers(2, 40))
    ids = tokens(batch, length, draw(st.integers(0, 9)))
    arguments = {}
    if draw(st.booleans()):
        labels = ids.clone()
        labels[
            torch.rand(labels.shape, generator=torch.Generator().manual_seed(length)) < draw(st.floats(0, 0.9))
        ] = -100
        labels[0, 1] = 3
        arguments["labels"] = labels
    if draw(st.booleans()):
        cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=3)))
        arguments["document_ids"] = torch.bucketize(
            torch.arange(length), torch.tensor(cuts, dtype=torch.long), right=True
        ).expand(batch, -1)
    if draw(st.booleans()):
        arguments["num_items"] = draw(st.integers(1, 50))
    elif "document_ids" in arguments or "labels" in arguments:
        arguments["num_items"] = 7
    page = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    budget = draw(st.sampled_from(["auto", 1, 20_000]))
    check(
        model,
        ids,
        ChunkConfig(
            chunk_tokens=draw(st.integers(1, length + 3)),
            page_tokens=page,
            gpu_kv_budget_bytes=budget,
            segment_tokens=draw(st.sampled_from([1, 8, 64])),
            gpu_keep_budget_bytes=draw(st.sampled_from([0, 4_000, 40_000, "auto"])),
            recompute=draw(st.sampled_from(["layer", "chunk"])),
            loss_tile_tokens=draw(st.sampled_from(["auto", 1, 5])),
        ),
        **arguments,
    )


@pytest.mark.parametrize("name", ["qwen2", "gpt_oss", "qwen3_moe"])
def test_own_loss_function(name):
    def smoothed(logits, labels):
        logs = logits.log_softmax(-1)
        return -0.9 * logs.gather(-1, labels[:, None])[:, 0] - 0.1 * logs.mean(-1)

    model, ids = build(configs()[name]), tokens(2, 19)
    config = ChunkConfig(chunk_tokens=5, page_tokens=4)
    check(model, ids, config, loss_fn=smoothed, dense_arguments={"token_loss": smoothed})


def test_a_chunk_without_labels_still_hands_gradients_back():
    model, ids = build(configs()["qwen2"]), tokens(1, 24)
    labels = ids.clone()
    labels[:, 9:17] = -100  # the whole second chunk
    check(model, ids, ChunkConfig(chunk_tokens=8, page_tokens=4), labels=labels)


def test_all_labels_ignored_is_fine_when_the_divisor_is_given():
    model, ids = build(configs()["qwen2"]), tokens(1, 24)
    config, labels = ChunkConfig(chunk_tokens=8, page_tokens=4), torch.full_like(ids, -100)
    loss = chunked_loss(model, ids, labels=labels, num_items=10, config=config)
    loss.backward()
    assert float(loss) == 0
    assert all(float(g.abs().max()) == 0 for g in gradients(model).values())
    with pytest.raises(ValueError, match="no token has a label"):
        chunked_loss(model, ids, labels=labels, config=config)
