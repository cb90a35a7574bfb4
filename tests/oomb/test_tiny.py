"""The byte-level tokenizer and the model that go with it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from oomb.tiny import END_OF_TEXT, byte_tokenizer, tiny_model

TOKENIZER = byte_tokenizer()


@settings(deadline=None, max_examples=200)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_any_text_comes_back_as_its_bytes(text):
    ids = TOKENIZER(text)["input_ids"]
    if END_OF_TEXT not in text:
        assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


@pytest.mark.parametrize("text", ["  two  spaces , n't", "e\u0301", "\ufeffbom", "\r\n\t\x0b\x00", "\U0010ffff", " "])
def test_nothing_is_normalized_or_cleaned_up(text):
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


def test_every_byte_is_its_own_id():
    assert len(TOKENIZER) == 257 and TOKENIZER.eos_token_id == 256
    for byte in range(128):
        assert TOKENIZER.decode([byte]) == chr(byte)
    for code in range(128, 0x800):
        assert TOKENIZER.decode(list(chr(code).encode())) == chr(code)


def test_saved_alone_it_is_loaded_unchanged(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    text = "e\u0301 " + END_OF_TEXT + "\r\n"
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text


def test_the_seed_decides_the_weights_and_leaves_the_global_state_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    one, again, other = tiny_model(64, seed=1), tiny_model(64, seed=1), tiny_model(64, seed=2)
    assert torch.equal(torch.rand(3), expected)
    weights = [model.model.layers[0].mlp.up_proj.weight for model in (one, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
