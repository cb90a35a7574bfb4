"""OombTrainer beside the stock Trainer: three steps of each give the same losses, gradient norms and weights."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from tests.numerics import relative
from tests.oomb.trainers import CHUNKS, arguments, collate, model, rows, run
from transformers import Trainer

from oomb import ChunkConfig, ChunkTrainerMixin, OombTrainer, api, chunked_loss
from oomb.loss import cross_entropy
from oomb.token_losses import refuse_if_not_a_sum


def adapted(dropout: float = 0.0):
    peft = get_peft_model(
        model(), LoraConfig(r=2, lora_dropout=dropout, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, p in peft.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.3)
    return peft


def both(trained, tmp_path, data=None, *, settings=None, **more):
    """Train with both and compare what they logged. Returns: our trainer"""
    stock, expected = run(Trainer, trained, tmp_path / "stock", data, settings=settings, **more)
    ours, logged = run(OombTrainer, trained, tmp_path / "ours", data, settings=settings, **more)
    assert len(expected.of("loss")) == 3
    for key in ("loss", "grad_norm", "learning_rate"):
        assert logged.of(key) == pytest.approx(expected.of(key), rel=1e-5), key
    before = dict(trained.named_parameters())
    for (name, p), other in zip(ours.model.named_parameters(), stock.model.parameters(), strict=True):
        moved = float((other - before[name]).detach().norm())
        assert float((p - other).detach().norm()) <= 1e-3 * moved, (
            name
        )  # Adam divides by gradients that are nearly nothing
    assert any(bool((p != before[name]).any()) for name, p in ours.model.named_parameters())
    return ours


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gpt_oss", "llama_tied", "qwen3_moe_balanced"])
def test_three_steps_of_an_architecture(name, tmp_path):
    settings = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "optim": "sgd", "learning_rate": 0.1}
    both(model(name), tmp_path, settings=settings)


SETTINGS = {
    "accumulation over uneven groups": {"gradient_accumulation_steps": 3, "num_train_epochs": 1, "max_steps": -1},
    "batches with padding": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2},
    "no clipping, a schedule": {"max_grad_norm": 0.0, "lr_scheduler_type": "cosine", "warmup_steps": 1},
    "checkpointed layers": {"gradient_checkpointing": True},
    "label smoothing": {"label_smoothing_factor": 0.3, "gradient_accumulation_steps": 2},
    "NEFTune": {"neftune_noise_alpha": 8.0, "gradient_accumulation_steps": 2},
    "adafactor": {"optim": "adafactor"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_three_steps_with(name, tmp_path):
    both(model(), tmp_path, settings={"optim": "sgd", "learning_rate": 0.1} | SETTINGS[name])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_three_steps_of_lora(checkpointing, tmp_path):
    trained = adapted()
    ours = both(trained, tmp_path, settings={"gradient_checkpointing": checkpointing, "optim": "sgd"})
    for name, p in ours.model.named_parameters():
        assert p.requires_grad or torch.equal(p, dict(trained.named_parameters())[name])


def focal(outputs, labels, num_items_in_batch=None):
    """A loss of one's own, as the Trainer's documentation has them."""
    logits, labels = outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
    return ((1 - torch.exp(-losses)) ** 2 * losses).sum() / num_items_in_batch


def test_three_steps_of_a_loss_of_ones_own(tmp_path):
    both(model(), tmp_path, compute_loss_func=focal, settings={"gradient_accumulation_steps": 2})


def mean_over_tokens(outputs, labels, num_items_in_batch=None):
    return focal(outputs, labels, (labels[:, 1:] != -100).sum())


def squared(outputs, labels, num_items_in_batch=None):
    return focal(outputs, labels, num_items_in_batch) ** 2


def hidden(outputs, labels, num_items_in_batch=None):
    return outputs.hidden_states[-1].mean()


@pytest.mark.parametrize("function", [mean_over_tokens, squared, hidden])
def test_a_loss_that_is_no_sum_over_tokens_is_refused(function, tmp_path):
    refuse_if_not_a_sum(focal)
    with pytest.raises(ValueError, match="compute_loss_func"):
        OombTrainer(model(), arguments(tmp_path), compute_loss_func=function)


def test_a_model_that_takes_no_item_count_is_averaged_batch_by_batch(tmp_path):
    class Stock(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.model_accepts_loss_kwargs = False

    class Ours(OombTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.model_accepts_loss_kwargs = False

    settings = {"gradient_accumulation_steps": 2}
    _, expected = run(Stock, model(), tmp_path, settings=settings)
    _, logged = run(Ours, model(), tmp_path, settings=settings)
    for key in ("loss", "grad_norm"):
        assert logged.of(key) == pytest.approx(expected.of(key), rel=1e-5)


@pytest.mark.parametrize("settings", [{}, {"label_smoothing_factor": 0.2}, {"per_device_eval_batch_size": 2}])
def test_evaluation_gives_the_stock_loss(settings, tmp_path):
    losses = []
    for kind, more in ((Trainer, {}), (OombTrainer, {"chunk_config": CHUNKS})):
        trainer = kind(model(), arguments(tmp_path, **settings), data_collator=collate, eval_dataset=rows(5), **more)
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_evaluation_changes_nothing_of_the_training(tmp_path):
    """Not even the random numbers it draws."""
    runs = []
    for strategy in ("no", "steps"):
        trainer, logged = run(
            OombTrainer, adapted(dropout=0.3), tmp_path / strategy, eval_dataset=rows(3, seed=1),
            settings={"eval_strategy": strategy, "eval_steps": 1},
        )  # fmt: skip
        runs.append((logged.of("loss"), list(trainer.model.parameters())))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


def test_bf16_autocast_keeps_float32_weights_and_follows_the_stock_trainer(tmp_path):
    expected = run(Trainer, model(), tmp_path, settings={"bf16": True})[1]
    trainer, logged = run(OombTrainer, model(), tmp_path, settings={"bf16": True})
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert logged.of("loss") == pytest.approx(expected.of("loss"), rel=2e-2)
    assert logged.of("loss") != run(OombTrainer, model(), tmp_path)[1].of("loss")


def test_logits_stay_in_16_bits_under_autocast(monkeypatch, tmp_path):
    """accelerate would have the model return float32: a tile of logits twice as large as the plan counts."""
    seen = []

    def watched(logits, labels):
        seen.append(logits.dtype)
        return cross_entropy(logits, labels)

    monkeypatch.setattr(api, "cross_entropy", watched)
    run(OombTrainer, model(), tmp_path, settings={"bf16": True, "max_steps": 1})
    assert set(seen) == {torch.bfloat16}


def test_a_loss_of_ones_own_gets_float32_logits_under_autocast(tmp_path):
    """As the stock Trainer hands it over."""
    seen = []

    def loss(outputs, labels, num_items_in_batch=None):
        seen.append(outputs.logits.dtype)
        return focal(outputs, labels, num_items_in_batch)

    for kind in (Trainer, OombTrainer):
        run(kind, model(), tmp_path, settings={"bf16": True, "max_steps": 1}, compute_loss_func=loss)
    assert torch.bfloat16 not in seen


def test_a_model_that_accelerate_prepared_wants_its_autocast():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare_model(model())
    ids = torch.randint(61, (1, 23), generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"with accelerator\.autocast"):
        chunked_loss(prepared, ids, config=CHUNKS)
    with accelerator.autocast():
        loss = chunked_loss(prepared, ids, config=CHUNKS).detach()
        expected = prepared(input_ids=ids, labels=ids).loss.detach()
    assert float(loss) == pytest.approx(float(expected), rel=2e-2)
    narrow = accelerator.prepare_model(model(dtype=torch.bfloat16))
    assert float(chunked_loss(narrow, ids, config=CHUNKS).detach()) == pytest.approx(float(expected), rel=5e-2)


def test_bf16_weights_sum_their_gradients_in_float32(tmp_path):
    fine = run(Trainer, model(dtype=torch.float32), tmp_path)[1].of("grad_norm")[0]
    chunks = ChunkConfig(chunk_tokens=1, page_tokens=4, fp32_main_grads=True)
    _, logged = run(OombTrainer, model(dtype=torch.bfloat16), tmp_path, chunk_config=chunks)
    assert logged.of("grad_norm")[0] == pytest.approx(fine, rel=3e-2)


@pytest.mark.parametrize("by", ["document_ids", "position_ids"])
@pytest.mark.parametrize("learned", [-100, 5])
def test_documents_of_a_packed_row_do_not_see_each_other(by, learned, tmp_path):
    """Whether or not the first token of a document has a label, which nothing before it could predict."""
    first, second = rows(2)
    lengths = (len(first["input_ids"]), len(second["input_ids"]))
    packed = {
        "input_ids": first["input_ids"] + second["input_ids"],
        "labels": first["labels"] + [learned] + second["labels"][1:],
        "document_ids": [0] * lengths[0] + [1] * lengths[1],
        "position_ids": [*range(lengths[0]), *range(lengths[1])],
    }
    del packed["position_ids" if by == "document_ids" else "document_ids"]

    def tensors(batch):
        return {name: torch.tensor([row[name] for row in batch]) for name in batch[0]}

    losses = []
    for data, steps, settings in (
        ([packed], tensors, {}),
        ([first, second], tensors, {"gradient_accumulation_steps": 2}),
    ):
        trainer = OombTrainer(
            model(), arguments(tmp_path, max_steps=1, optim="sgd", **settings), train_dataset=data,
            data_collator=steps, chunk_config=CHUNKS,
        )  # fmt: skip
        trainer.train()
        losses.append((trainer.state.log_history[0]["loss"], trainer.state.log_history[0]["grad_norm"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "more", "complaint"),
    [
        ({}, {"compute_metrics": lambda p: {}}, "compute_metrics: it needs the logits"),
        ({}, {"preprocess_logits_for_metrics": lambda a, b: a}, "preprocess_logits_for_metrics"),
        ({"torch_compile": True}, {}, "torch_compile=True"),
        ({"auto_find_batch_size": True}, {}, "auto_find_batch_size"),
        ({"optim": "lomo"}, {}, "inside the backward"),
        ({"optim": "galore_adamw_layerwise"}, {}, "inside the backward"),
        ({"optim": "grokadamw"}, {}, "needs the package grokadamw.*pip install grokadamw"),
        ({}, {"chunk_config": {"chunk_tokens": 8}}, "chunk_config must be a ChunkConfig"),
    ],
)
def test_what_a_chunked_step_cannot_honour_is_refused(settings, more, complaint, tmp_path):
    with pytest.raises(ValueError, match=complaint):
        OombTrainer(model(), arguments(tmp_path, **settings), train_dataset=rows(2), data_collator=collate, **more)


class OwnLoss(OombTrainer):
    def compute_loss(self, *args, **kwargs):
        raise AssertionError("never called")


class Rewarding(Trainer):
    def training_step(self, *args, **kwargs):
        raise AssertionError("never called")


class ChunkedRewarding(ChunkTrainerMixin, Rewarding):
    pass


class OwnStep(OombTrainer):
    def training_step(self, *args, **kwargs):
        return 2 * super().training_step(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "name"), [(OwnLoss, "OwnLoss.compute_loss"), (ChunkedRewarding, "Rewarding.training_step")]
)
def test_a_loss_that_would_be_passed_over_is_refused(kind, name, tmp_path):
    with pytest.raises(ValueError, match=f"{name} would not be called"):
        kind(model(), arguments(tmp_path))


def test_a_step_around_ours_is_called(tmp_path):
    losses = [
        run(kind, model(), tmp_path, settings={"max_steps": 1})[1].of("loss")[0] for kind in (OombTrainer, OwnStep)
    ]
    assert losses[1] == pytest.approx(2 * losses[0])


def test_a_loss_of_the_trainers_own_beside_load_balancing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="output_router_logits"):
        OombTrainer(model("qwen3_moe_balanced"), arguments(tmp_path, label_smoothing_factor=0.1))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda b: b | {"token_type_ids": b["input_ids"]}, "token_type_ids, which a chunked step does not know"),
        (lambda b: {"input_ids": b["input_ids"]}, "holds no labels"),
        (lambda b: b | {"seq_idx": b["input_ids"]}, "without position_ids"),
        (lambda b: b | {"attention_mask": b["attention_mask"].flip(1)}, "pads row 1 on the left"),
    ],
)
def test_a_batch_of_another_kind_is_refused(change, complaint, tmp_path):
    trainer = OombTrainer(model(), arguments(tmp_path), chunk_config=CHUNKS)
    batch = change(collate(rows(2)))
    trainer.current_gradient_accumulation_steps = 1
    with pytest.raises(ValueError, match=complaint):
        trainer.training_step(trainer.model, batch)


def test_predict_and_outputs_are_refused(tmp_path):
    trainer = OombTrainer(model(), arguments(tmp_path), data_collator=collate)
    with pytest.raises(ValueError, match="logits of every token"):
        trainer.predict(rows(1))
    with pytest.raises(ValueError, match="return_outputs"):
        trainer.compute_loss(trainer.model, collate(rows(1)), return_outputs=True)


def test_compute_loss_is_a_scalar_that_walks_back(tmp_path):
    trainer = OombTrainer(model(), arguments(tmp_path), chunk_config=CHUNKS)
    batch = collate(rows(1))
    trainer.compute_loss(trainer.model, batch).backward()
    ours = [p.grad.clone() for p in trainer.model.parameters()]
    trainer.model.zero_grad()
    trainer.model(**batch).loss.backward()
    for grad, p in zip(ours, trainer.model.parameters(), strict=True):
        assert relative(grad, p.grad) < 1e-4
