"""`model.generate` over pages gives, token for token, what it gives over transformers' own cache."""

import copy

import pytest
import torch
from tests.models import VOCAB, build, configs
from tests.oomb.test_architectures import EXACT
from tests.oomb.test_architectures import build as architecture
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, GptOssConfig, Qwen2Config

from paged_kv import OutOfPages
from paged_kv.hf_cache import PagedCache

NAMES = ("qwen2", "qwen2_window", "qwen3", "llama", "llama_tied", "gpt_oss", "qwen3_moe")


def make(name, **more):
    model = build(configs()[name], **({"dtype": torch.float32} | more)).eval()
    model.generation_config.pad_token_id = 0
    return model


def prompts(lengths, device="cpu", seed=0):
    """Padded on the left, as generate wants them."""
    torch.manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(1, VOCAB, (len(lengths), width))
    mask = torch.ones_like(ids)
    for row, n in enumerate(lengths):
        mask[row, : width - n] = 0
    return {"input_ids": (ids * mask).to(device), "attention_mask": mask.to(device)}


def pages(cache):
    return cache.kv.pool.table.total_pages - cache.kv.pool.table.free_pages


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_the_default_cache(name):
    model = make(name)
    inputs = prompts((20, 7, 1, 16)) | {"max_new_tokens": 20, "do_sample": False}
    want = model.generate(**inputs)
    with PagedCache(model, tokens=400, page_tokens=16) as cache:
        assert torch.equal(model.generate(**inputs, **cache.argument), want)
        lengths = [n + 19 for n in (20, 7, 1, 16)]  # the last token is never run
        assert [cache.kv.length(s) for s in cache.kv.sequences] == lengths, "padding takes no place"
        assert pages(cache) == sum(-(-n // 16) for n in lengths)


@pytest.mark.parametrize("name", [name for name in EXACT if name not in ("Gemma4Text", "JetMoe")])
def test_greedy_tokens_of_many_architectures(name):
    model = architecture(name).float().eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    inputs = prompts((20, 7)) | {"max_new_tokens": 12, "do_sample": False}
    want = model.generate(**inputs)
    with PagedCache(model, tokens=400, page_tokens=16) as cache:
        assert torch.equal(model.generate(**inputs, **cache.argument), want)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Gemma4Text", "no one number and size of heads for all layers"),
        ("JetMoe", "other keys than it gave"),
        ("Doge", "asks its attention mask for 'dtype'"),
        ("Qwen3Next", "layers of kind linear_attention"),
        ("Gemma2", "softcap"),
        ("Bloom", "does not let its attention be replaced"),
    ],
)
def test_architectures_that_are_refused(name, reason):
    model = architecture(name).float().eval()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=reason), PagedCache(model, tokens=400, page_tokens=16) as cache:
        model.generate(**prompts((20, 7)), max_new_tokens=3, pad_token_id=0, **cache.argument)
    assert model.config._attn_implementation == before


def test_what_a_cache_of_keys_and_values_has_not_is_refused_and_may_be_asked_for():
    """DeepSeek V4 stores more; other models ask first."""
    with PagedCache(make("qwen2"), tokens=64) as cache:
        assert not hasattr(cache.layers[0], "store_compression_weights")
        with pytest.raises(ValueError, match="asks its cache for 'store_compression_weights'"):
            cache.layers[0].store_compression_weights(0)


def test_another_default_device_changes_nothing():
    """What is made on the host is made there whatever `torch.set_default_device` says: nothing else can be pinned."""
    model = make("qwen2_window")
    inputs = prompts((70, 7, 3))
    outputs = []
    for device in ("cpu", "meta"):
        with PagedCache(model, tokens=600, page_tokens=4) as cache, torch.no_grad(), torch.device(device):
            logits = [model(**inputs, **cache.argument).logits]
            mask = torch.cat((inputs["attention_mask"], torch.ones(3, 2, dtype=torch.long, device="cpu")), 1)
            cache.crop(-3)
            cache.batch_repeat_interleave(2)
            ids = inputs["input_ids"][:, -4:].repeat_interleave(2, 0)
            mask = mask[:, :71].repeat_interleave(2, 0)
            positions = mask.cumsum(1)[:, -4:] - 1
            logits.append(model(ids, attention_mask=mask, position_ids=positions, **cache.argument).logits)
            outputs.append(logits)
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def test_logits_are_those_of_the_default_cache():
    model = make("gpt_oss")
    inputs = prompts((12, 5)) | {"max_new_tokens": 15, "do_sample": False}
    more = {"output_logits": True, "return_dict_in_generate": True}
    want = model.generate(**inputs, **more)
    with PagedCache(model, tokens=200, page_tokens=16) as cache:
        got = model.generate(**inputs, **more, **cache.argument)
    for a, b in zip(got.logits, want.logits):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen2", "gpt_oss"])
def test_the_model_is_left_as_it_was_found(name):
    model = make(name)
    before = copy.deepcopy(model.config.to_dict()), copy.deepcopy(model.generation_config.to_dict())
    registered = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    implementation = model.config._attn_implementation
    inputs = prompts((9, 4)) | {"max_new_tokens": 5, "do_sample": False}
    want = model.generate(**inputs)
    with pytest.raises(KeyError), PagedCache(model, tokens=100, page_tokens=16) as cache:
        model.generate(**inputs, **cache.argument)
        raise KeyError
    assert model.config._attn_implementation == implementation
    assert (model.config.to_dict(), model.generation_config.to_dict()) == before
    assert (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping) == registered
    assert pages(cache) == 0 and torch.equal(model.generate(**inputs), want)


def test_beams_share_their_past():
    model = make("llama")
    inputs = prompts((30, 11)) | {"max_new_tokens": 12, "do_sample": False, "num_beams": 4}
    want = model.generate(**inputs)
    with PagedCache(model, tokens=800, page_tokens=16) as cache:
        assert torch.equal(model.generate(**inputs, **cache.argument), want)


def test_drafts_that_are_rejected_are_cut_off_again():
    model = make("gpt_oss")
    ids = torch.tensor([[5, 6, 7, 8, 9] * 3])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False}
    want = model.generate(**inputs)
    with PagedCache(model, tokens=200, page_tokens=16) as cache:
        assert torch.equal(model.generate(**inputs, prompt_lookup_num_tokens=4, **cache.argument), want)
        assert cache.kv.length(cache.kv.sequences[0]) == cache.get_seq_length() == 34


def test_a_prefix_is_run_and_stored_once():
    """64 tokens of system prompt before six questions: their pages are there once, and the answers are the same."""
    model = make("qwen2")
    prefix, questions = prompts((64,), seed=1), prompts((9, 3, 5, 9, 2, 7), seed=2)
    count = len(questions["input_ids"])
    whole = {n: torch.cat((prefix[n].expand(count, -1), questions[n]), 1) for n in prefix}
    options = {"max_new_tokens": 10, "do_sample": False}
    apart = torch.cat([
        model.generate(
            input_ids=torch.cat((prefix["input_ids"], row[mask.bool()][None]), 1),
            attention_mask=torch.ones(1, 64 + int(mask.sum()), dtype=torch.long), **options,
        )[:, -10:]
        for row, mask in zip(questions["input_ids"], questions["attention_mask"])
    ])  # fmt: skip
    with PagedCache(model, tokens=16 * 24, page_tokens=16) as cache:
        with torch.no_grad():
            model(**prefix, use_cache=True, **cache.argument)
        assert pages(cache) == 4
        cache.batch_repeat_interleave(count)
        assert pages(cache) == 4, "forks take no page"
        out = model.generate(**whole, **options, **cache.argument)
        assert torch.equal(out[:, -10:], apart)
        shared = pages(cache)
    lengths = [64 + n + 9 for n in (9, 3, 5, 9, 2, 7)]
    alone = sum(-(-n // 16) for n in lengths)
    assert shared == alone - (count - 1) * 4, "each sequence but one saves the prefix's pages"


def test_a_conversation_goes_on_and_can_be_cut_back():
    model = make("qwen3")
    first = prompts((14, 6))
    options = {"max_new_tokens": 8, "do_sample": False}
    want_first = model.generate(**first, **options)
    more = torch.cat((want_first, prompts((5, 5), seed=3)["input_ids"]), 1)
    mask = torch.cat((first["attention_mask"], torch.ones(2, 13, dtype=torch.long)), 1)
    want = model.generate(input_ids=more, attention_mask=mask, **options)
    with PagedCache(model, tokens=400, page_tokens=16) as cache:
        assert torch.equal(model.generate(**first, **options, **cache.argument), want_first)
        for _ in range(2):
            out = model.generate(input_ids=more, attention_mask=mask, **options, **cache.argument)
            assert torch.equal(out, want)
            cache.crop(-(cache.get_seq_length() - 21))
            assert [cache.kv.length(s) for s in cache.kv.sequences] == [21, 13]
        with pytest.raises(ValueError, match=r"\[-21, 0\]"):
            cache.crop(-22)


def test_what_is_refused():
    model, other = make("qwen2_window"), make("llama")
    inputs = prompts((9, 4))
    run = {"use_cache": True}
    with pytest.raises(ValueError, match="tokens and page_tokens"):
        PagedCache(model, tokens=0)
    with torch.no_grad(), PagedCache(model, tokens=64, page_tokens=16) as cache:
        with pytest.raises(ValueError, match="other keys"):
            model(**inputs, use_cache=False)
        four = torch.ones(2, 1, 9, 9, dtype=torch.bool)
        with pytest.raises(ValueError, match="mask of its own"):
            model(inputs["input_ids"], attention_mask=four, **run, **cache.argument)
        gap = inputs["attention_mask"].clone()
        gap[0, 4] = 0
        with pytest.raises(ValueError, match="pad on the left"):
            model(inputs["input_ids"], attention_mask=gap, **run, **cache.argument)
        cache.reset()
        model(**inputs, **run, **cache.argument)
        with pytest.raises(ValueError, match="has changed"):
            model(inputs["input_ids"][:, :1], attention_mask=torch.ones(2, 10), **run, **cache.argument)
        with pytest.raises(ValueError, match="expected 2 sequences"):
            model(inputs["input_ids"][:1, :1], **run, **cache.argument)
        cache.reset()
        with pytest.raises(OutOfPages):
            model(**prompts((60, 30)), **run, **cache.argument)
        assert pages(cache) == 0
        model(**inputs, **run, **cache.argument)
    with pytest.raises(ValueError, match="other keys"), PagedCache(other, tokens=64) as cache:
        other.generate(**inputs, max_new_tokens=2)


def snapshot(cache):
    kv = cache.kv
    return kv.sequences, [kv.length(s) for s in kv.sequences], pages(cache), cache.get_seq_length(), cache._batch


@pytest.mark.parametrize("refusal", ["out of pages", "too many sequences"])
def test_a_batch_that_does_not_fit_leaves_nothing_and_a_smaller_one_runs(refusal):
    model, small = make("qwen2"), prompts((5,)) | {"max_new_tokens": 4, "do_sample": False}
    want = model.generate(**small)
    with PagedCache(model, tokens=64, page_tokens=16, max_sequences=3) as cache:
        before = snapshot(cache)
        if refusal == "out of pages":
            with pytest.raises(OutOfPages, match="6 more pages needed, 4 of 4 free"):
                model.generate(**prompts((40, 33)), max_new_tokens=4, **cache.argument)
        else:
            with pytest.raises(ValueError, match="at most 3 sequences, got a batch of 4"):
                model.generate(**prompts((5,) * 4), max_new_tokens=4, **cache.argument)
        assert snapshot(cache) == before
        assert torch.equal(model.generate(**small, **cache.argument), want)


@pytest.mark.parametrize("indices", [[2], [-1], [], [0, 2], [0.0], [True], [0, 1, 0, 1, 0]])
def test_a_selection_that_does_not_fit_changes_nothing(indices):
    model, inputs = make("qwen2"), prompts((9, 4)) | {"max_new_tokens": 4, "do_sample": False}
    with PagedCache(model, tokens=400, page_tokens=16, max_sequences=4) as cache:
        model.generate(**inputs, **cache.argument)
        before = snapshot(cache)
        with pytest.raises(ValueError, match="expected"):
            cache.batch_select_indices(torch.tensor(indices))
        for repeats in (0, -1, 1.5, "2", True, 3):
            with pytest.raises(ValueError, match="expected"):
                cache.batch_repeat_interleave(repeats)
        for columns in (-1.5, "2", None, 1, -13):
            with pytest.raises(ValueError, match="expected an int in"):
                cache.crop(columns)
        assert snapshot(cache) == before
        cache.batch_repeat_interleave(2)
        assert len(cache.kv.sequences) == 4


def test_only_its_own_models_attention_reads_the_pages():
    """Any other would see no past, and generate something all the same."""
    model, other = make("qwen2"), make("llama")
    inputs = prompts((9, 4)) | {"max_new_tokens": 4, "do_sample": False}
    want, cache = model.generate(**inputs), PagedCache(model, tokens=400, page_tokens=16)
    for _ in range(2):  # before it is in force, and after
        with pytest.raises(ValueError, match="only the attention of its own"):
            model.generate(**inputs, **cache.argument)
        with cache:
            with pytest.raises(ValueError, match="only the attention of its own"):
                other.generate(**inputs, **cache.argument)
            with pytest.raises(ValueError, match="in force already"), cache:
                pass
            assert torch.equal(model.generate(**inputs, **cache.argument), want)
    assert torch.equal(model.generate(**inputs), want)


@pytest.mark.parametrize("name", ["qwen2", "gpt_oss"])
def test_no_backward_goes_through_it(name):
    model, inputs = make(name), prompts((9, 4))
    with PagedCache(model, tokens=400, page_tokens=16) as cache:
        out = model(**inputs, use_cache=True, **cache.argument).logits
        with pytest.raises(RuntimeError, match="has no backward"):
            out.sum().backward()


@pytest.mark.parametrize("name", ["qwen2_window", "gpt_oss"])
def test_prompts_in_parts_of_which_some_are_padding_only(name):
    model, inputs = make(name), prompts((12, 7))
    inputs = {n: torch.nn.functional.pad(x, (9, 0)) for n, x in inputs.items()}
    options = {"max_new_tokens": 6, "do_sample": False, "prefill_chunk_size": 4}
    want = model.generate(**inputs, **options)
    with PagedCache(model, tokens=400, page_tokens=16) as cache:
        assert torch.equal(model.generate(**inputs, **options, **cache.argument), want)
        assert [cache.kv.length(s) for s in cache.kv.sequences] == [17, 12]


SAMPLED = {"do_sample": True, "top_k": 20, "temperature": 1.3, "num_return_sequences": 2}


@pytest.mark.parametrize("name", ["qwen2_window", "gpt_oss"])
@pytest.mark.parametrize("lengths", [(1,), (1, 1), (13, 6, 1)], ids=str)
@pytest.mark.parametrize(
    "options",
    [{"max_new_tokens": 1}, SAMPLED, SAMPLED | {"num_beams": 3}],
    ids=["one token", "sampled", "beam sampled"],
)
def test_sampling_one_token_and_prompts_of_one_token(name, lengths, options):
    model = make(name)
    inputs = prompts(lengths) | {"max_new_tokens": 8} | options
    torch.manual_seed(1)
    want = model.generate(**inputs)
    with PagedCache(model, tokens=1000, page_tokens=16) as cache:
        torch.manual_seed(1)
        assert torch.equal(model.generate(**inputs, **cache.argument), want)


@pytest.mark.parametrize("kind", ["both ways", "blocks"])
def test_masks_that_are_no_window_are_refused(kind):
    from paged_kv.hf_mask import seen_by

    see = {"both ways": lambda b, h, q, k: k >= 0, "blocks": lambda b, h, q, k: (k <= q) & (k // 64 == q // 64)}[kind]
    with pytest.raises(ValueError, match="neither causal nor"):
        seen_by(kv_length=9, mask_function=see)


# What only a GPU shows

WIDE = {"hidden_size": 256, "head_dim": 64, "vocab_size": VOCAB, "num_hidden_layers": 3, "intermediate_size": 256}
WIDE |= {"num_attention_heads": 8, "num_key_value_heads": 2, "pad_token_id": None, "eos_token_id": None}
ON_GPU = {
    "qwen2": lambda: Qwen2Config(**WIDE),
    # Every token takes both experts: a router's toss in the last bits would part the tokens for no fault of the cache.
    "gpt_oss": lambda: GptOssConfig(**WIDE, num_local_experts=2, num_experts_per_tok=2, sliding_window=40),
    "tiny llama": lambda: configs()["llama"],
}


def distance(got, exact):
    """The largest difference of a logit over all steps."""
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(got.logits, exact.logits, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("name", ON_GPU)
def test_logits_on_a_gpu_in_bfloat16(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ON_GPU[name]()).to("cuda", torch.bfloat16).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0.0, 1.2 * p.shape[-1] ** -0.5)
    inputs = prompts((300, 7, 130, 64), "cuda") | {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0}
    more = {"output_logits": True, "return_dict_in_generate": True}
    want = model.generate(**inputs, **more)
    # Near a tie, rounding decides which token comes, and all that follow: the others are told the same tokens.
    more["prefix_allowed_tokens_fn"] = lambda row, ids: [int(want.sequences[row, len(ids)])]
    exact = copy.deepcopy(model).float().generate(**inputs, **more)
    with PagedCache(model, tokens=4096) as cache:
        got = model.generate(**inputs, **more, **cache.argument)
    assert torch.equal(got.sequences, want.sequences)
    assert distance(got, exact) <= 2 * distance(want, exact)
