"""A rewired model in use: caches, generation, padding, attention kernels, recorded outputs, dtypes."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache

import siamesenorm
from siamesenorm.probes import capture_streams
from tests import oracle
from tests.hosts.running import (
    by_hand,
    cache_of,
    padded,
    positions_of,
    token_by_token,
)
from tests.hosts.tiny import FAMILIES, SCHEMES, SIAMESE, host, rewired, shared, tokens
from tests.parity import relative_error


def new_cache(kind, model, batch, length):
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=length)


# Caches and generation


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", SCHEMES)
@torch.no_grad()
def test_token_by_token_is_the_full_forward_with_left_padding(scheme, family, kind):
    model = shared(family, scheme)
    ids, mask = padded((12, 5, 9), 12)
    full = model(input_ids=ids, attention_mask=mask, position_ids=positions_of(mask)).logits
    steps = token_by_token(model, ids, mask, new_cache(kind, model, 3, 12))
    real = mask.bool()
    assert relative_error(steps[real], full[real]) < 1e-5


@pytest.mark.parametrize("scheme", SIAMESE)
@torch.no_grad()
def test_a_prompt_in_pieces(scheme):
    model = shared("qwen3", scheme)
    ids = tokens(2, 12)
    full, cache = model(input_ids=ids).logits, None
    pieces = []
    for piece in ids.split((5, 1, 4, 2), 1):
        out = model(input_ids=piece, cache=cache, use_cache=True)
        pieces.append(out.logits)
        cache = cache_of(out)
    assert relative_error(torch.cat(pieces, 1), full) < 1e-5


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", SIAMESE)
def test_greedy_generation_is_decoding_by_hand(scheme, family, cache):
    model = shared(family, scheme)
    ids, mask = padded((9, 4, 7), 9)
    # A static cache is compiled where a GPU is; here it is the plain model.
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=8, do_sample=False, cache_implementation=cache, disable_compile=True
    )
    assert torch.equal(out, by_hand(model, ids, mask, 8))


@pytest.mark.parametrize("scheme", SIAMESE)
def test_sampling_follows_the_seed(scheme):
    model, drawn = shared("llama", scheme), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(model.generate(tokens(2, 5), max_new_tokens=12, do_sample=True, temperature=2.0))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert drawn[0].shape == (2, 17)


@pytest.mark.parametrize("scheme", SIAMESE)
@torch.no_grad()
def test_beams_score_what_the_model_scores(scheme):
    model, ids = shared("llama", scheme), tokens(2, 5)
    out = model.generate(
        ids,
        max_new_tokens=4,
        num_beams=3,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        length_penalty=1.0,
    )
    logits = model(input_ids=out.sequences).logits.log_softmax(-1)
    picked = logits[:, 4:-1].gather(-1, out.sequences[:, 5:, None]).squeeze(-1)
    torch.testing.assert_close(out.sequences_scores, picked.sum(-1) / 4, rtol=1e-5, atol=1e-5)
    greedy = model.generate(ids, max_new_tokens=4, do_sample=False)
    greedy = model(input_ids=greedy).logits.log_softmax(-1)[:, 4:-1].gather(-1, greedy[:, 5:, None]).sum((1, 2)) / 4
    assert (out.sequences_scores >= greedy - 1e-5).all()


# Padding


@torch.no_grad()
def log_likelihoods(model, rows, side):
    ids, mask = padded_rows(rows, side)
    positions = positions_of(mask) if side == "left" else None
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits.log_softmax(-1)
    picked = logits[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (picked * mask[:, 1:] * mask[:, :-1]).sum(-1)


def padded_rows(rows, side):
    seq = max(len(row) for row in rows)
    ids, mask = torch.zeros(len(rows), seq, dtype=torch.long), torch.zeros(len(rows), seq, dtype=torch.long)
    for i, row in enumerate(rows):
        place = slice(seq - len(row), seq) if side == "left" else slice(0, len(row))
        ids[i, place], mask[i, place] = row, 1
    return ids, mask


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_batch_size_does_not_change_log_likelihoods(scheme, side):
    model = shared("llama", scheme)
    rows = [tokens(1, length, seed=length)[0] for length in (13, 4, 9, 1, 7, 12, 2, 11, 5, 6)]
    alone = torch.cat([log_likelihoods(model, [row], side) for row in rows])
    for batch in (4, 5, 10):
        together = torch.cat([log_likelihoods(model, rows[i : i + batch], side) for i in range(0, 10, batch)])
        torch.testing.assert_close(together, alone, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("scheme", SIAMESE)
def test_an_empty_row_leaves_the_others_as_they_are(scheme, attention):
    model = copy.deepcopy(shared("llama", scheme))
    model.set_attn_implementation(attention)
    ids, mask = padded((8, 0, 5), 8)
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions_of(mask)).logits
    rest = [0, 2]
    alone = model(input_ids=ids[rest], attention_mask=mask[rest], position_ids=positions_of(mask)[rest]).logits
    real = mask[rest].bool()
    assert relative_error(out[rest][real], alone[real]) < 1e-5
    out[rest][real].sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_padding_against_the_oracle(scheme):
    name, options = SCHEMES[scheme]
    model = rewired("llama", scheme).double()
    ids, mask = padded((10, 3, 8), 10)
    expected, _ = oracle.hf_lm(dict(model.named_parameters()), model.config, name, ids, padding=mask, **options)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions_of(mask)).logits
    real = mask.bool()
    assert relative_error(logits[real], expected[real]) < 1e-10


# Attention


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", SIAMESE)
@torch.no_grad()
def test_sdpa_and_eager_agree(scheme, family):
    model = copy.deepcopy(shared(family, scheme))
    ids, mask = padded((13, 6))
    sdpa = model(input_ids=ids, attention_mask=mask).logits
    model.set_attn_implementation("eager")
    eager = model(input_ids=ids, attention_mask=mask).logits
    assert relative_error(eager[mask.bool()], sdpa[mask.bool()]) < 1e-5


WINDOWED = {
    "mistral": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    "qwen3": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
}


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_sliding_window_against_the_oracle(scheme, family):
    name, options = SCHEMES[scheme]
    model = rewired(family, scheme, **WINDOWED[family]).double()
    weights = dict(model.named_parameters())
    logits = model(input_ids=tokens()).logits
    expected, _ = oracle.hf_lm(weights, model.config, name, tokens(), window=4, **options)
    whole, _ = oracle.hf_lm(weights, model.config, name, tokens(), **options)
    assert relative_error(logits, expected) < 1e-10
    assert relative_error(whole, expected) > 1e-3


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("scheme", SIAMESE)
@torch.no_grad()
def test_the_sliding_window_in_both_kernels_and_in_the_cache(scheme, family):
    model = rewired(family, scheme, **WINDOWED[family])
    full = model(input_ids=tokens()).logits
    cache, steps = None, []
    for token in tokens().split(1, 1):
        out = model(input_ids=token, cache=cache, use_cache=True)
        steps.append(out.logits)
        cache = cache_of(out)
    assert relative_error(torch.cat(steps, 1), full) < 1e-5
    model.set_attn_implementation("eager")
    assert relative_error(model(input_ids=tokens()).logits, full) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_attention_functions_get_what_the_host_gives_them(family):
    """Kernels such as flash attention take the window, scaling and dropout as arguments, not from the mask."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen = []

    def spy(module, query, key, value, mask, **kwargs):
        plain = {k: v for k, v in kwargs.items() if isinstance(v, int | float | str | None)}
        seen.append((module.layer_idx, query.shape, key.shape, value.shape, plain))
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("spy", spy)
    ALL_MASK_ATTENTION_FUNCTIONS.register("spy", sdpa_mask)
    window = WINDOWED.get(family, {})
    for model in (host(family, **window), rewired(family, "hybrid-pre", **window)):
        model.set_attn_implementation("spy")
        model(input_ids=tokens())
    plain, ours = seen[:3], seen[3:]
    if window:
        assert all(call[-1]["sliding_window"] == 4 for call in ours)
    for theirs, mine in zip(plain, ours, strict=True):
        assert mine[:-1] == theirs[:-1]
        assert mine[-1].items() >= {k: v for k, v in theirs[-1].items() if v is not None}.items()


def test_windows_in_some_layers_alone():
    model = rewired("qwen3", "hybrid-pre", use_sliding_window=True, sliding_window=4, max_window_layers=2)
    assert model.config.layer_types == ["full_attention", "full_attention", "sliding_attention"]
    whole = rewired("qwen3", "hybrid-pre")
    ids = tokens()
    with capture_streams(model) as some, capture_streams(whole) as none:
        model(input_ids=ids)
        whole(input_ids=ids)
    assert torch.equal(some[1][0], none[1][0])
    assert not torch.allclose(some[2][0], none[2][0])


# What a model records


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", SCHEMES)
@torch.no_grad()
def test_hidden_states_are_what_blocks_read(scheme, family):
    model = shared(family, scheme)
    with capture_streams(model) as streams:
        out = model(input_ids=tokens(), output_hidden_states=True)
    weights, states = dict(model.named_parameters()), out.hidden_states
    assert len(states) == 4
    assert torch.equal(states[0], model.model.embed_tokens(tokens()))
    for index in (1, 2):
        residual = f"model.layers.{index}.attn_residual."
        parts = streams[index - 1]
        if len(parts) == 2:
            x, y = parts
            c1 = weights.get(residual + "c1")
            x = c1 * x if c1 is not None else oracle.norm_of(weights, residual + "norm_x")(x)
            expected = x + oracle.norm_of(weights, residual + "norm_y")(y)
        else:
            (expected,) = parts
        torch.testing.assert_close(states[index], expected)
    torch.testing.assert_close(model.lm_head(states[-1]), out.logits)
    assert torch.equal(states[-1], model.model(input_ids=tokens()).last_hidden_state)


@pytest.mark.parametrize("scheme", SIAMESE)
@torch.no_grad()
def test_attentions_of_the_eager_kernel(scheme):
    model = copy.deepcopy(shared("qwen2", scheme))
    model.set_attn_implementation("eager")
    out = model(input_ids=tokens(), output_attentions=True, output_hidden_states=True)
    assert len(out.attentions) == 3
    assert len(out.hidden_states) == 4
    for weights in out.attentions:
        assert weights.shape == (2, 4, 13, 13)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 13))
        assert (weights.triu(1) == 0).all()
    assert len({w.sum().item() + w.square().sum().item() for w in out.attentions}) == 3


@torch.no_grad()
def test_recording_stops_where_it_is_not_asked_for():
    model = copy.deepcopy(shared())
    first = model(input_ids=tokens(), output_hidden_states=True)
    second = model(input_ids=tokens())
    assert second.hidden_states is None
    assert torch.equal(first.logits, second.logits)
    assert len(model(input_ids=tokens(), output_hidden_states=True).hidden_states) == 4


@torch.no_grad()
def test_a_host_that_recorded_before_it_was_rewired():
    results = []
    for before in (False, True):
        model = host()
        model.set_attn_implementation("eager")
        if before:
            model(input_ids=tokens(), output_hidden_states=True, output_attentions=True)
        siamesenorm.rewire(model, "siamese", x="hybrid")
        results.append(model(input_ids=tokens(), output_hidden_states=True, output_attentions=True))
    fresh, recorded = results
    for name in ("hidden_states", "attentions"):
        assert len(recorded[name]) == len(fresh[name])
        assert all(torch.equal(a, b) for a, b in zip(recorded[name], fresh[name], strict=True))


@torch.no_grad()
def test_some_hidden_states_alone():
    model = copy.deepcopy(shared())
    every = model(input_ids=tokens(), output_hidden_states=True).hidden_states
    some = model(input_ids=tokens(), output_hidden_states=[1, -1]).hidden_states
    found = [h for h in some if h is not None]
    assert len(found) == 2
    assert torch.equal(found[0], every[1])
    assert torch.equal(found[1], every[-1])


@torch.no_grad()
def test_generation_records_a_state_per_step():
    out = shared().generate(
        tokens(2, 5), max_new_tokens=3, do_sample=False, return_dict_in_generate=True, output_hidden_states=True
    )
    assert [len(step) for step in out.hidden_states] == [4, 4, 4]
    assert [step[1].shape[1] for step in out.hidden_states] == [5, 1, 1]


# Losses and inputs


@pytest.mark.parametrize("scheme", SIAMESE)
def test_labels_are_shifted_as_in_the_host(scheme):
    model, ids = shared("llama", scheme), tokens()
    labels = ids.clone()
    labels[0, 5:8] = -100
    out = model(input_ids=ids, labels=labels)
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids))
    assert torch.equal(embedded.logits, out.logits)
    torch.testing.assert_close(model(input_ids=ids, logits_to_keep=3).logits, out.logits[:, -3:])


def test_embeddings_can_grow():
    model = rewired("llama", "post-pre")
    before = model(input_ids=tokens()).logits
    model.resize_token_embeddings(105)
    after = model(input_ids=tokens()).logits
    assert after.shape[-1] == 105
    torch.testing.assert_close(after[..., :97], before)


# dtypes


@pytest.mark.parametrize("stream_dtype", [None, "float32"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_bf16_weights(scheme, stream_dtype):
    exact = rewired("qwen2", scheme, options={"stream_dtype": stream_dtype})
    model = copy.deepcopy(exact).bfloat16()
    exact = copy.deepcopy(model).float()
    seen = {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "gate_proj", "model.norm")):
            module.register_forward_hook(lambda m, args, out, n=name: seen.update({n: out.dtype}))
    with capture_streams(model) as streams:
        out = model(input_ids=tokens(), labels=tokens(), output_hidden_states=True)
    assert len(seen) == 7
    assert set(seen.values()) == {torch.bfloat16}
    assert {t.dtype for s in streams for t in s} == {torch.float32 if stream_dtype else torch.bfloat16}
    assert {h.dtype for h in out.hidden_states} == {torch.bfloat16}
    assert out.logits.dtype == torch.bfloat16
    out.loss.backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.bfloat16 for p in model.parameters())
    assert relative_error(out.logits, exact(input_ids=tokens()).logits) < 0.1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bf16_autocast(scheme):
    model = copy.deepcopy(shared("llama", scheme))
    exact = model(input_ids=tokens(), labels=tokens())
    with torch.autocast("cpu", torch.bfloat16), capture_streams(model) as streams:
        out = model(input_ids=tokens(), labels=tokens())
    assert {t.dtype for s in streams for t in s} == {torch.float32}
    assert relative_error(out.logits, exact.logits) < 0.1
    assert abs(out.loss.item() - exact.loss.item()) < 0.05 * exact.loss.item()
    out.loss.backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in model.parameters())


@torch.no_grad()
def test_float32_streams_in_a_bf16_model_generate_and_checkpoint():
    model = rewired("qwen3", "hybrid-pre", options={"stream_dtype": "float32"}).bfloat16()
    ids = tokens(2, 5)
    out = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert out.shape == (2, 9)
    full = model(input_ids=tokens()).logits
    cache, steps = None, []
    for token in tokens().split(1, 1):
        step = model(input_ids=token, cache=cache, use_cache=True)
        steps.append(step.logits)
        cache = cache_of(step)
    assert relative_error(torch.cat(steps, 1), full) < 0.05


def test_the_class_is_still_the_hosts():
    model = shared()
    assert isinstance(model, transformers.LlamaForCausalLM)
    assert isinstance(model.model, transformers.LlamaModel)
    assert model.can_generate()
    assert siamesenorm.hosts.scheme_of(model.config).name == "siamese"
