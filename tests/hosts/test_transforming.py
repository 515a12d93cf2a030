"""What others do to a model: activation checkpoints, compilation, export, sharding, adapters, placement."""

from __future__ import annotations

import copy
import warnings

import peft
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import siamesenorm
from siamesenorm import hosts, ops
from siamesenorm.probes import capture_streams
from tests.hosts.running import (
    same,
    sharded,
    step,
    trained,
)
from tests.hosts.tiny import SCHEMES, SHAPE, SIAMESE, config, host, rewired, shared, tokens
from tests.parity import relative_error

# Activation checkpointing


@pytest.mark.parametrize("stream_dtype", [None, "float32"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_activation_checkpointing_changes_nothing(scheme, reentrant, stream_dtype):
    model = rewired("qwen2", scheme, options={"stream_dtype": stream_dtype}).train()
    model = model.bfloat16() if stream_dtype else model.double()
    expected = step(model)
    calls = []
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *args: calls.append(1))
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = step(model)
    assert len(calls) == 2, "a checkpoint computes its block twice"
    same(got, expected, 1e-12)
    calls.clear()
    model.activation_checkpointing_disable()
    same(step(model), expected, 1e-12)
    assert len(calls) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_with_a_cache_asked_for(reentrant):
    model = rewired("llama", "hybrid-pre").train().double()
    expected = step(model)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    same(step(model, use_cache=True), expected, 1e-12)


def test_checkpointing_with_a_cache_given():
    from transformers import DynamicCache

    model = rewired("llama", "hybrid-pre").train().double()
    expected = step(model)
    model.activation_checkpointing_enable({"use_reentrant": False})
    same(step(model, cache=DynamicCache(config=model.config)), expected, 1e-12)


def test_every_second_block_checkpointed():
    model = rewired("llama", "post-pre").train()
    expected = step(model)
    model.activation_checkpointing_enable(every_n_layers=2)
    same(step(model), expected, 1e-12)


@pytest.mark.parametrize("scheme", SIAMESE)
def test_checkpointing_under_autocast_and_with_dropout(scheme):
    model = rewired("llama", scheme, attention_dropout=0.3).train()
    results = []
    for enabled in (False, True):
        if enabled:
            model.activation_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(4)
        with torch.autocast("cpu", torch.bfloat16):
            results.append(step(model))
    same(results[1], results[0], 1e-12)


def test_a_wrapper_of_torch_around_each_block():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    model = rewired("llama", "hybrid-pre").train()
    expected = step(model)
    blocks = set(hosts.blocks(model))
    apply_activation_checkpointing(model, check_fn=lambda m: m in blocks)
    loss, gradients = step(model)
    same((loss, {n.replace("_checkpoint_wrapped_module.", ""): g for n, g in gradients.items()}), expected, 1e-12)


def test_generation_while_checkpointing_is_on():
    model = rewired("llama", "hybrid-pre")
    expected = model.generate(tokens(1, 4), max_new_tokens=5, do_sample=False)
    model.activation_checkpointing_enable()
    assert torch.equal(model.generate(tokens(1, 4), max_new_tokens=5, do_sample=False), expected)


# Compilation


def graphs(scheme, layers, lengths):
    """How many graphs there are after each length."""
    torch._dynamo.reset()
    counter, counts = CompileCounterWithBackend("aot_eager"), []
    model = rewired("llama", scheme, num_hidden_layers=layers)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for length in lengths:
        ids = tokens(2, length)
        torch.testing.assert_close(compiled(input_ids=ids, use_cache=False).logits, model(input_ids=ids).logits)
        counts.append(counter.frame_count)
    return counts


@pytest.mark.parametrize("scheme", SIAMESE)
def test_the_whole_model_is_one_graph_whatever_its_depth(scheme):
    assert graphs(scheme, 1, [8]) == graphs(scheme, 4, [8]) == [1]


@pytest.mark.parametrize("scheme", SIAMESE)
def test_a_second_length_compiles_once_more_and_no_other_does(scheme):
    # torch specialises, then generalises.
    assert graphs(scheme, 2, [8, 11, 17, 5]) == [1, 2, 2, 2]


@pytest.mark.parametrize("stream_dtype", [None, "float32"])
@pytest.mark.parametrize("scheme", SIAMESE)
def test_compiled_training_gives_the_same_gradients(scheme, stream_dtype):
    torch._dynamo.reset()
    model = rewired("qwen3", scheme, num_hidden_layers=2, options={"stream_dtype": stream_dtype}).train()
    model = model.bfloat16() if stream_dtype else model
    # What a compiler is given is the plain form.
    with ops.use("plain"):
        expected = step(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    loss = compiled(input_ids=tokens(), labels=tokens(), use_cache=False).loss
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    same((loss.detach(), gradients), expected, 0.02 if stream_dtype else 1e-5)


@pytest.mark.parametrize("scheme", SIAMESE)
def test_blocks_compiled_one_by_one_share_their_graphs(scheme):
    counts = []
    for layers in (4, 12):
        torch._dynamo.reset()
        model = rewired("llama", scheme, num_hidden_layers=layers)
        with ops.use("plain"):
            expected = [model(input_ids=tokens(2, length), use_cache=False).logits for length in (13, 9, 17)]
        counter = CompileCounterWithBackend("eager")
        for block in hosts.blocks(model):
            block.compile(fullgraph=True, backend=counter)
        for length, logits in zip((13, 9, 17), expected, strict=True):
            torch.testing.assert_close(model(input_ids=tokens(2, length), use_cache=False).logits, logits)
        counts.append(counter.frame_count)
    # The first block opens the streams, so it has graphs of its own.
    assert counts[0] == counts[1] <= 4


@pytest.mark.parametrize("scheme", SIAMESE)
def test_export_with_any_batch_and_length(scheme):
    model = shared("llama", scheme)

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(input_ids=ids, use_cache=False).logits

    shape = {"ids": {0: torch.export.Dim("batch", max=16), 1: torch.export.Dim("seq", max=48)}}
    exported = torch.export.export(Logits(), (tokens(2, 9),), dynamic_shapes=shape)
    for batch, seq in ((2, 9), (3, 14), (5, 31)):
        ids = tokens(batch, seq)
        with ops.use("plain"):
            expected = model(input_ids=ids).logits
        torch.testing.assert_close(exported.module()(ids), expected, rtol=1e-5, atol=1e-5)


# Sharding


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("scheme", SIAMESE)
def test_fully_sharded_blocks_train_as_plain_ones(mesh, scheme, checkpointing):
    plain = rewired("llama", scheme).train()
    model = copy.deepcopy(plain)
    expected = trained(plain)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    sharded(model, mesh)
    assert trained(model) == pytest.approx(expected, rel=1e-6)
    assert expected[-1] < expected[0]
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert relative_error(a.full_tensor(), b) < 1e-5, name


@pytest.mark.parametrize("scheme", SIAMESE)
def test_sharded_in_bf16_with_float32_streams(mesh, scheme):
    model = rewired("llama", scheme, options={"stream_dtype": "float32"}).train()
    exact = trained(copy.deepcopy(model))
    sharded(model, mesh, param_dtype=torch.bfloat16)
    with capture_streams(model) as streams:
        losses = trained(model)
    assert {t.dtype for s in streams for t in s} == {torch.float32}
    assert losses == pytest.approx(exact, rel=0.05)


# Adapters


@pytest.mark.parametrize("scheme", SIAMESE)
def test_adapters_merge(scheme):
    model = rewired("llama", scheme)
    before = model(input_ids=tokens()).logits
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "down_proj"])
    )
    torch.testing.assert_close(adapted(input_ids=tokens()).logits, before)
    trainable = {n for n, p in adapted.named_parameters() if p.requires_grad}
    assert len(trainable) == 3 * 4 * 2
    assert all("lora" in n for n in trainable)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    adapted.eval()
    tuned = adapted(input_ids=tokens()).logits
    assert not torch.allclose(tuned, before)
    merged = adapted.merge_and_unload()
    assert type(merged) is type(model)
    assert relative_error(merged(input_ids=tokens()).logits, tuned) < 1e-5


@pytest.mark.parametrize("saved", [["norm_x", "norm_y"], ["attn_residual", "mlp_residual", "readout"]])
@pytest.mark.parametrize("scheme", SIAMESE)
def test_what_the_scheme_adds_is_trained_beside_adapters(scheme, saved, tmp_path):
    before = rewired("llama", scheme)(input_ids=tokens()).logits
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], modules_to_save=saved)
    adapted = peft.get_peft_model(rewired("llama", scheme), config)
    torch.testing.assert_close(adapted(input_ids=tokens()).logits, before)
    adapted.train()(input_ids=tokens(), labels=tokens()).loss.backward()
    own = {n: p for n, p in adapted.named_parameters() if p.requires_grad and "lora" not in n}
    names = {n.replace(".modules_to_save.default", "").rsplit(".", 2)[-2] for n in own}
    # The vector of hybrid-pre is no module, so only what holds it can be named.
    assert names == {"norm_x", "norm_y"} | ({"attn_residual"} if scheme != "post-pre" and len(saved) == 3 else set())
    assert all(p.grad.abs().max() > 0 for p in own.values())
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2)
    tuned = adapted.eval()(input_ids=tokens()).logits
    with adapted.disable_adapter():
        torch.testing.assert_close(adapted(input_ids=tokens()).logits, before)
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(rewired("llama", scheme), tmp_path)
    torch.testing.assert_close(again.eval()(input_ids=tokens()).logits, tuned)
    merged = adapted.merge_and_unload()
    assert relative_error(merged(input_ids=tokens()).logits, tuned) < 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_adapters_under_activation_checkpointing(reentrant):
    model = rewired("llama", "hybrid-pre")
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["v_proj"], init_lora_weights=False)
    ).train()
    adapted.enable_input_require_grads()
    adapted(input_ids=tokens(), labels=tokens()).loss.backward()
    expected = {n: p.grad.clone() for n, p in adapted.named_parameters() if p.grad is not None}
    assert len(expected) == 6
    adapted.zero_grad()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    adapted(input_ids=tokens(), labels=tokens()).loss.backward()
    for name, parameter in adapted.named_parameters():
        if name in expected:
            assert relative_error(parameter.grad, expected[name]) < 1e-6, name


# Placement


def test_blocks_are_not_split_over_devices():
    from accelerate import infer_auto_device_map

    model = shared("llama", "post-pre")
    names = {type(block).__name__ for block in hosts.blocks(model)}
    assert names == {"ResidualLlamaDecoderLayer"}
    for made in (model, hosts.build("llama", SHAPE, "siamese"), siamesenorm.rewire(host().model, "siamese")):
        assert names <= set(made._no_split_modules)
    size = sum(p.numel() * 4 for p in model.parameters())
    placed = infer_auto_device_map(
        model, {0: size // 2, "cpu": size}, no_split_module_classes=list(model._no_split_modules)
    )
    assert not any(name.startswith("model.layers.") and name.count(".") > 2 for name in placed)


def test_moving_a_model_moves_all_of_it():
    model = siamesenorm.rewire(host(), "siamese", x="hybrid").to("meta")
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert config("llama").model_type == "llama"
