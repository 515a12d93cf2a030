"""Features after blocks: what they are, through every door by which timm gives them out."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from timm.models._features import FeatureGetterNet

from siamesenorm import hosts
from siamesenorm.probes import capture_streams
from siamesenorm.residual import ConfigError, close_streams
from tests.parity import relative_error
from tests.timm.models import ALL, HEADS, SHAPE, exact, host, images, rewired
from tests.timm.reference import vit

TINY = {**SHAPE, "num_classes": 10}
SEVERAL = ("post-pre", "hyper", "attnres", "mgr", "spannorm")


def created(**changes):
    torch.manual_seed(0)
    return timm.create_model("siamese_deit_tiny_patch16_224", **{**TINY, **changes})


@pytest.mark.parametrize("scheme", ALL)
def test_a_feature_is_the_closed_streams(scheme):
    """Cut off behind a block, the model ends in the feature after it."""
    model = exact("class", scheme)
    x = images(dtype=torch.float64)
    with capture_streams(model) as streams:
        last, bare = model.forward_intermediates(x, output_fmt="NLC", return_prefix_tokens=True)
        captured = list(streams)
    _, normed = model.forward_intermediates(x, output_fmt="NLC", return_prefix_tokens=True, norm=True)
    for depth, pair in enumerate(zip(captured, bare, normed, strict=True), 1):
        closed = close_streams(model.norm.readout, pair[0])
        assert torch.equal(torch.cat(pair[1][::-1], 1), closed)
        assert torch.equal(torch.cat(pair[2][::-1], 1), model.norm(closed))
        cut = copy.deepcopy(model)
        cut.blocks = cut.blocks[:depth]
        assert torch.equal(cut.forward_features(x), model.norm(closed))
    assert torch.equal(last, model.forward_features(x))


def test_a_feature_against_the_oracle():
    model = exact("registers", "post-pre")
    weights = dict(model.named_parameters())
    x = images(dtype=torch.float64)
    kept = {n: w for n, w in weights.items() if not n.startswith("blocks.2.")}
    _, features, _ = vit(kept, x, "siamese", heads=HEADS, eps=0.1)
    (got,) = model.get_intermediate_layers(x, [1], norm=True)
    assert relative_error(got, features[:, 5:]) < 1e-10


@pytest.mark.parametrize("form", ["class", "average", "average-alone", "registers", "any-size", "no-final-norm"])
@pytest.mark.parametrize("norm", [False, True])
def test_every_option_does_what_it_does_in_timm(form, norm):
    theirs = host(form).double()
    ours = rewired(form, "pre").double()
    ours.load_state_dict(theirs.state_dict())
    x = images(size=48 if form == "any-size" else 32, dtype=torch.float64)
    for fmt in ("NCHW", "NLC"):
        for prefix in (False, True):
            for indices in (None, 2, [0, 2], [-1], (1,)):
                for early in (False, True):
                    given = {
                        "norm": norm,
                        "output_fmt": fmt,
                        "return_prefix_tokens": prefix,
                        "indices": indices,
                        "stop_early": early,
                    }
                    for more in ({}, {"intermediates_only": True}, {"output_dict": True}):
                        _alike(ours.forward_intermediates(x, **given, **more),
                               theirs.forward_intermediates(x, **given, **more))  # fmt: skip
    both = {"output_dict": True, "intermediates_only": True, "return_prefix_tokens": True}
    _alike(ours.forward_intermediates(x, **both), theirs.forward_intermediates(x, **both))
    _alike(ours.forward_intermediates(x, is_causal=True), theirs.forward_intermediates(x, is_causal=True))
    for reshape in (False, True):
        for prefix in (False, True):
            given = {"n": 2, "reshape": reshape, "return_prefix_tokens": prefix, "norm": norm}
            _alike(ours.get_intermediate_layers(x, **given), theirs.get_intermediate_layers(x, **given))


def _alike(got, wanted):
    assert type(got) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert got.shape == wanted.shape
        # timm's streams have the patches' layout, a fused read's are contiguous.
        assert got.is_contiguous() or not wanted.is_contiguous()
        assert relative_error(got, wanted) < 1e-12
    elif isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for key in wanted:
            _alike(got[key], wanted[key])
    else:
        assert len(got) == len(wanted)
        for a, b in zip(got, wanted, strict=True):
            _alike(a, b)


def test_stopping_early_runs_no_more_blocks():
    model = rewired()
    with capture_streams(model) as streams:
        model.forward_intermediates(images(), [0, 1], stop_early=True)
    assert len(streams) == 2


@pytest.mark.parametrize("pool", ["token", "avg"])
@pytest.mark.parametrize("norm", [False, True])
def test_features_only(pool, norm):
    whole = created(global_pool=pool).eval()
    extractor = created(features_only=True, out_indices=[0, 2], global_pool=pool).eval()
    if norm:
        extractor = FeatureGetterNet(copy.deepcopy(whole), [0, 2], norm=True)
    names = {n.removeprefix("model.") for n in extractor.state_dict()}
    missing = {n for n in whole.state_dict() if n.startswith(("head", "fc_norm"))}
    missing |= set() if norm else {n for n in whole.state_dict() if n in ("norm.weight", "norm.bias")}
    assert names == whole.state_dict().keys() - missing
    assert "norm.readout.norm_x.weight" in names
    got = extractor(images())
    wanted = whole.forward_intermediates(images(), [0, 2], norm=norm, intermediates_only=True)
    assert [feature.shape for feature in got] == [(2, 48, 4, 4)] * 2
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert extractor.feature_info.channels() == [48, 48]
    # DeiT's patches are 16 wide by name, and 8 here.
    assert extractor.feature_info.reduction() == [8, 8]


@pytest.mark.parametrize("scheme", SEVERAL)
def test_pruning_keeps_what_is_left_as_it_is(scheme):
    model = rewired("average", scheme)
    wanted = model.forward_intermediates(images(), [1], intermediates_only=True)[0]
    pruned = copy.deepcopy(model)
    assert pruned.prune_intermediate_layers([1], prune_norm=True) == [1]
    assert len(hosts.blocks(pruned)) == 2
    assert torch.equal(pruned.forward_intermediates(images(), [1], intermediates_only=True)[0], wanted)
    left = {n for n in model.state_dict() if n.startswith("norm.")} - {"norm.weight", "norm.bias"}
    assert {n for n in pruned.state_dict() if n.startswith("norm.")} == left
    tokens = pruned.forward_features(images())
    assert torch.equal(tokens[:, 1:].mT.unflatten(-1, (4, 4)), wanted)
    normed = copy.deepcopy(model)
    normed.prune_intermediate_layers([1], prune_norm=False, prune_head=False)
    assert {n for n in normed.state_dict() if n.startswith("norm.")} >= left
    assert normed(images()).shape == (2, 10)


def test_timms_own_loop_over_the_blocks():
    """As in code that was written for timm's model: the first block opens the stack, and ``norm`` closes it."""
    for form in ("class", "average"):
        model = rewired(form)
        x = model.norm_pre(model._pos_embed(model.patch_embed(images())))
        by_sequence = model.norm(model.blocks(x))
        for block in model.blocks:
            x = block(x)
        assert torch.equal(model.norm(x), model.forward_features(images()))
        assert torch.equal(by_sequence, model.norm(x))


def test_what_can_be_wrong():
    model = rewired()
    with pytest.raises(ConfigError, match="output_fmt is 'NCHW' or 'NLC', not 'NHWC'"):
        model.forward_intermediates(images(), output_fmt="NHWC")
    with pytest.raises(ConfigError, match="block 1 takes the streams of the block before it"):
        model.blocks[1](torch.randn(2, 17, 48))
    with pytest.raises(ConfigError, match="these blocks return streams: leave it at 'getter'"):
        created(features_only=True, feature_cls="hook")
