"""Activation checkpointing inside a step."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.chunk_recur.cases import KVStore, Recurrent, Transformer, assert_same, causal, take_grads
from torch.utils.checkpoint import checkpoint

from chunk_recur import State, chunk_recurrent, chunk_recurrent_backward, reference

REENTRANT = pytest.mark.parametrize("reentrant", [True, False])


@REENTRANT
@pytest.mark.parametrize("region", [None, torch.bfloat16])
def test_recurrent_network_with_dropout(reentrant: bool, region: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model = Recurrent(dropout=0.3, dtype=torch.float64 if region is None else torch.float32)
    x = torch.randn(2, 7, 3, dtype=model.initial.dtype, requires_grad=True)
    leaves = [*model.parameters(), x]

    def step(index, chunk, h, phase):
        return checkpoint(model, chunk, h, use_reentrant=reentrant)

    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=region is not None):
        expected = reference.chunk_recurrent(model.step, x.split(3, 1), State(model.start(2)))
    expected.backward()
    grads = take_grads(leaves)
    tolerance = 1e-12 if region is None else 2e-2
    for entry in ("loss", "whole"):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=region is not None):
            state = State(model.start(2))
            if entry == "loss":
                loss = chunk_recurrent(step, x.split(3, 1), state, params=model.parameters())
            else:
                loss = chunk_recurrent_backward(step, x.split(3, 1), state)
        if entry == "loss":
            loss.backward()
        assert_same([loss, *take_grads(leaves)], [expected, *grads], tolerance)


@REENTRANT
@pytest.mark.parametrize("chunk", [1, 3, 5, 7])
def test_layers_over_a_store(reentrant: bool, chunk: int) -> None:
    torch.manual_seed(0)
    model, store = Transformer(layers=3), KVStore(3)
    x = torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True)
    labelled = torch.ones(2, 7)
    leaves = [*model.parameters(), x]
    expected = model(x, labelled, lambda layer, q, kv: causal(q, kv))
    expected.backward()
    grads = take_grads(leaves)
    model.wrap = partial(checkpoint, use_reentrant=reentrant)
    chunks = list(zip(x.split(chunk, 1), labelled.split(chunk, 1)))
    loss = chunk_recurrent(model.stepper(store), chunks, State((), (store,)), params=model.parameters())
    loss.backward()
    assert_same([loss, *take_grads(leaves)], [expected, *grads], 1e-11)
    chunk_recurrent_backward(model.stepper(store), chunks, State((), (store,)))
    assert_same(take_grads(leaves), grads, 1e-11)


def test_reentrant_checkpoints_refuse_a_choice_of_inputs_and_the_others_allow_it() -> None:
    model = Recurrent()
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    weight = model.head.weight
    reference.chunk_recurrent(model.step, x.split(3, 1), State(model.start(2))).backward(inputs=[weight])
    (grad,) = take_grads([weight])

    def loss_of(reentrant: bool):
        def step(index, chunk, h, phase):
            return checkpoint(model, chunk, h, use_reentrant=reentrant)

        return chunk_recurrent(step, x.split(3, 1), State(model.start(2)), params=model.parameters())

    loss_of(False).backward(inputs=[weight])
    assert_same(take_grads([weight]), [grad])
    with pytest.raises(RuntimeError, match="use_reentrant=True"):
        loss_of(True).backward(inputs=[weight])


def test_a_whole_loss_under_a_checkpoint() -> None:
    """Wasteful, since the forward then runs twice, but not wrong."""
    model = Recurrent(dropout=0.3)
    x = torch.randn(2, 7, 3, dtype=torch.float64, requires_grad=True)
    leaves = [*model.parameters(), x]

    def loss_of(x):
        return chunk_recurrent(model.step, x.split(3, 1), State(model.start(2)), params=model.parameters())

    torch.manual_seed(0)
    loss_of(x).backward()
    grads = take_grads(leaves)
    for reentrant in (True, False):
        torch.manual_seed(0)
        checkpoint(loss_of, x, use_reentrant=reentrant).backward()
        assert_same(take_grads(leaves), grads)
