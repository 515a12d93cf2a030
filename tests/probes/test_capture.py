"""The streams that ``capture_streams`` shows: right, live, one entry per block, and of the last forward alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from siamesenorm.probes import capture_streams
from siamesenorm.residual import ConfigError, Stack
from tests import oracle
from tests.hosts.tiny import SCHEMES, SIAMESE, host, rewired, shared, tokens
from tests.parity import relative_error


@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_against_the_oracle(scheme):
    name, options = SCHEMES[scheme]
    model = rewired("qwen3", scheme).double()
    _, states = oracle.hf_lm(dict(model.named_parameters()), model.config, name, tokens(), **options)
    with capture_streams(model) as streams:
        model(input_ids=tokens())
    assert len(streams) == len(states) == 3
    for got, wanted in zip(streams, states, strict=True):
        assert isinstance(got, tuple)
        assert len(got) == len(wanted)
        for stream, reference in zip(got, wanted, strict=True):
            assert relative_error(stream, reference) < 1e-10


@pytest.mark.parametrize("scheme", SIAMESE)
def test_they_are_live(scheme):
    name, options = SCHEMES[scheme]
    model = rewired("llama", scheme).double()
    weights = dict(model.named_parameters())
    with capture_streams(model) as streams:
        model(input_ids=tokens())
    _, states = oracle.hf_lm(weights, model.config, name, tokens(), **options)
    used = [
        n
        for n in weights
        if "layers.2" not in n and "norm.readout" not in n and n not in ("model.norm.weight", "lm_head.weight")
    ]
    for which in (0, 1):
        ours = torch.autograd.grad(streams[1][which].square().sum(), [weights[n] for n in used], retain_graph=True)
        theirs = torch.autograd.grad(states[1][which].square().sum(), [weights[n] for n in used], retain_graph=True)
        for n, a, b in zip(used, ours, theirs, strict=True):
            assert relative_error(a, b) < 1e-10, n


def test_a_loss_on_the_streams_adds_to_the_models_own():
    model = rewired("llama", "post-pre")
    with capture_streams(model) as streams:
        out = model(input_ids=tokens(), labels=tokens())
        (out.loss + 0.1 * streams[-1][0].square().mean()).backward()
    with_penalty = model.model.layers[0].mlp.up_proj.weight.grad.clone()
    model.zero_grad()
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    assert not torch.allclose(with_penalty, model.model.layers[0].mlp.up_proj.weight.grad)


def test_cleared_at_each_forward():
    model = shared()
    with capture_streams(model) as streams:
        assert streams == []
        model(input_ids=tokens(2, 7))
        first = list(streams)
        model(input_ids=tokens(3, 5))
        assert len(first) == len(streams) == 3
        assert {t.shape for s in first for t in s} == {(2, 7, 32)}
        assert {t.shape for s in streams for t in s} == {(3, 5, 32)}
        kept = streams
    assert len(kept) == 3


def test_nothing_is_left_behind():
    model = rewired()
    expected = model(input_ids=tokens()).logits
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    with pytest.raises(ValueError, match="input_ids"), capture_streams(model) as streams:  # noqa: PT012
        model(input_ids=tokens())
        model()
    before = list(streams)
    model(input_ids=tokens(1, 3))
    assert len(streams) == len(before)
    assert all(a is b for a, b in zip(streams, before, strict=True))
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks
    assert torch.equal(model(input_ids=tokens()).logits, expected)


def test_two_captures_at_once():
    model = shared()
    with capture_streams(model) as outer:
        with capture_streams(model.model) as inner:
            model(input_ids=tokens())
        model(input_ids=tokens(1, 4))
    assert inner[0][0].shape == (2, 13, 32)
    assert outer[0][0].shape == (1, 4, 32)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("scheme", SIAMESE)
def test_under_activation_checkpointing(scheme, reentrant):
    model = rewired("llama", scheme).train()
    with capture_streams(model) as streams:
        model(input_ids=tokens())
        expected = [tuple(t.detach() for t in s) for s in streams]
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        loss = model(input_ids=tokens(), labels=tokens()).loss
        captured = list(streams)
        loss.backward()
        assert len(streams) == 3
        assert all(a is b for a, b in zip(streams, captured, strict=True))
    for got, wanted in zip(streams, expected, strict=True):
        assert all(torch.equal(a, b) and a.requires_grad for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_that_runs_again_in_the_backward_pass_is_not_captured_again(reentrant):
    """Whoever checkpoints a block from outside (the engine, a Stack's owner) calls the module itself once more."""
    stack = Stack([nn.Linear(8, 8) for _ in range(6)], "siamese", 8)

    def checkpointed(forward):
        return lambda streams, arguments: checkpoint(
            lambda *flat: forward(flat, arguments), *streams, use_reentrant=reentrant
        )

    def through(h):
        streams = (h, h)
        for block in stack.blocks:
            streams = checkpointed(block)(streams, {})
        return stack.norm(stack.readout.close(streams))

    h = torch.randn(2, 8, requires_grad=True)
    with capture_streams(stack) as streams:
        out = through(h)
        captured = [tuple(t.detach().clone() for t in s) for s in streams]
        assert len(captured) == 3
        out.sum().backward()
        assert len(streams) == 3
        for got, wanted in zip(streams, captured, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_generation_leaves_the_last_step():
    model = shared("llama", "hybrid-pre")
    with capture_streams(model) as streams:
        out = model.generate(tokens(2, 5), max_new_tokens=4, do_sample=False)
        last = list(streams)
        model(input_ids=out[:, :-1])
    assert {t.shape for s in last for t in s} == {(2, 1, 32)}
    for step, full in zip(last, streams, strict=True):
        for a, b in zip(step, full, strict=True):
            assert relative_error(a[:, 0], b[:, -1]) < 1e-5


def test_a_stack_of_ones_own():
    stack = Stack([nn.Linear(8, 8) for _ in range(4)], "siamese", 8)
    h = torch.randn(2, 8)
    with capture_streams(nn.Sequential(nn.Identity(), stack)) as streams:
        out = stack(h)
    assert len(streams) == 2
    x, y = streams[-1]
    torch.testing.assert_close(out, stack.norm(stack.readout.close((x, y))))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_marker_of_wide_streams_is_hidden(scheme):
    model = rewired("llama", scheme, options={"stream_dtype": "float32"}).bfloat16()
    with capture_streams(model) as streams:
        model(input_ids=tokens())
    count = 2 if SCHEMES[scheme][0] == "siamese" else 1
    assert [len(s) for s in streams] == [count] * 3
    assert {t.shape for s in streams for t in s} == {(2, 13, 32)}
    assert {t.dtype for s in streams for t in s} == {torch.float32}


@pytest.mark.parametrize("make", [host, lambda: nn.Linear(2, 2)])
def test_what_has_no_streams(make):
    with pytest.raises(ConfigError, match="no residual streams: rewire it first"), capture_streams(make()):
        pass
