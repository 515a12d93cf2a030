"""Residual warm-up (ProRes), a schedule that every scheme has: its equation, and its step under what runs a model."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounterWithBackend

import siamesenorm
from siamesenorm import hosts
from siamesenorm.residual import ConfigError, Site, Sublayer, make_scheme, schemes, set_step
from tests.hosts.running import same, step
from tests.hosts.tiny import host, scatter, tokens
from tests.parity import relative_error


def sublayers(model):
    return [module for module in model.modules() if isinstance(module, Sublayer)]


def warming(scheme="siamese", layers=3, warmup=4, **options):
    model = siamesenorm.rewire(host(num_hidden_layers=layers), scheme, warmup_steps=warmup, **options)
    return scatter(model, 1).train()


def at(model, t):
    set_step(model, hosts.scheme_of(model.config), t)
    return model


@pytest.mark.parametrize("name", schemes())
def test_every_scheme_has_the_schedule(name):
    made = make_scheme(name, warmup_steps=10)
    assert make_scheme(name).warmup_steps is None
    for block in (0, 1, 5):
        site = Site(2 * block, block, "attention", 6, 12)
        for t in (1, 9, 10, 35, 60, 10**9):
            assert made.gate(site, t) == min(t / (10 * (block + 1)), 1)
            assert make_scheme(name).gate(site, t) == 1.0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "'warmup_steps' of scheme 'pre' cannot be 0: a schedule of no steps"),
        (-3, "'warmup_steps' of scheme 'pre' must be a whole number of at least 1, or none, not -3"),
        (1.5, "must be a whole number"),
        (True, "must be a whole number"),
        (False, "must be a whole number"),
        ("1000", "must be a whole number"),
    ],
)
def test_a_schedule_of_no_steps_is_refused(value, message):
    with pytest.raises(ConfigError, match=message):
        make_scheme("pre", warmup_steps=value)


@pytest.mark.parametrize("scheme", ["pre", "post", "siamese", "hyper", "mhc", "attnres", "mgr"])
def test_the_branch_output_is_multiplied(scheme):
    """A gate of g is the same model with each block's last matrices multiplied by g."""
    model = warming(scheme)
    open_ = copy.deepcopy(model)
    logits = at(model, 2)(input_ids=tokens()).logits
    with torch.no_grad():
        for block, layer in enumerate(open_.model.layers):
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight.mul_(2 / (4 * (block + 1)))
    assert relative_error(logits, open_(input_ids=tokens()).logits) < 1e-5
    assert relative_error(at(model, 100)(input_ids=tokens()).logits, logits) > 1e-2


def test_gates_belong_to_the_step_and_not_to_the_model(tmp_path):
    model = warming()
    names = set(model.state_dict())
    assert [float(s.gate) for s in sublayers(model)] == [1.0] * 6
    assert [float(s.gate) for s in sublayers(at(model, 3))] == [3 / 4] * 2 + [3 / 8] * 2 + [3 / 12] * 2
    exact = at(copy.deepcopy(model).double(), 1)
    assert [float(s.gate) for s in sublayers(exact)] == [1 / 4] * 2 + [1 / 8] * 2 + [1 / 12] * 2
    assert set(model.state_dict()) == names
    assert list(sublayers(model)[0].buffers()) == []
    assert [float(s.gate) for s in sublayers(copy.deepcopy(model))] == [float(s.gate) for s in sublayers(model)]

    model.eval().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["residual_scheme"]["warmup_steps"] == 4
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert [s.gate for s in sublayers(again)] == [1.0] * 6
    closed, loaded = model(input_ids=tokens()).logits, again(input_ids=tokens()).logits
    assert not torch.allclose(closed, loaded)
    assert torch.equal(at(model, 12)(input_ids=tokens()).logits, loaded)
    assert torch.equal(at(again, 3)(input_ids=tokens()).logits, closed)


def test_without_a_schedule_nothing_is_multiplied():
    model = siamesenorm.rewire(host(), "siamese")
    at(model, 1)
    assert [s.gate for s in sublayers(model)] == [1.0] * 6


def test_gates_work_in_any_dtype():
    model = at(warming("siamese"), 1)
    exact = at(copy.deepcopy(model).double(), 1)
    reference = exact(input_ids=tokens()).logits
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.2)):
        logits = model.to(dtype)(input_ids=tokens()).logits
        assert logits.dtype == dtype
        assert relative_error(logits.double(), reference) < tolerance


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("scheme", ["siamese", "peri", "hyper", "attnres"])
def test_under_activation_checkpointing(scheme, reentrant):
    model = at(warming(scheme).double(), 2)
    expected = step(model)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    got = step(model)
    query = "model.layers.0.attn_residual.query"
    for gradients in (expected[1], got[1]):
        gradients.pop(query, None)
    same(got, expected, 1e-12)


@pytest.mark.parametrize("scheme", ["siamese", "peri"])
def test_a_new_step_compiles_nothing_anew(scheme):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = at(warming(scheme, layers=2, warmup=2), 1)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for t in range(1, 8):
        at(model, t)
        logits = compiled(input_ids=tokens(), use_cache=False).logits
        assert relative_error(logits, model(input_ids=tokens(), use_cache=False).logits) < 1e-5
        logits.sum().backward()
    assert counter.frame_count == 1


def test_blocks_compiled_one_by_one_share_their_graphs():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    model = at(warming("siamese", layers=6, warmup=2), 1)
    for block in hosts.blocks(model):
        block.compile(fullgraph=True, backend=counter)
    found = []
    for t in range(1, 14):
        at(model, t)
        found.append(model(input_ids=tokens(), use_cache=False).logits)
    # The first block opens the streams, and the scale of the others becomes a variable with the second of them.
    assert counter.frame_count <= 3
    again = at(warming("siamese", layers=6, warmup=2), 5)
    torch.testing.assert_close(found[4], again(input_ids=tokens(), use_cache=False).logits)
