"""What timm's training script does with a model, on random data, and what it asks of the model for it."""

from __future__ import annotations

import copy
import re
from argparse import Namespace
from pathlib import Path

import pytest
import timm
import torch
from timm.loss import SoftTargetCrossEntropy
from timm.models import group_parameters, load_checkpoint, resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import CheckpointSaver, ModelEmaV3, dispatch_clip_grad
from torch._dynamo.testing import CompileCounterWithBackend

import siamesenorm
from siamesenorm import hosts
from siamesenorm.probes import capture_streams
from siamesenorm.residual import make_scheme, set_step
from tests.hosts.running import same
from tests.hosts.tiny import scatter
from tests.parity import relative_error
from tests.timm.models import ALL, SHAPE, dead, exact, gradients, host, images, live, rewired

SEVERAL = ("post-pre", "hybrid-pre", "hyper", "mhc", "attnres", "mgr", "spannorm", "peri")


class Script:
    """The parts of timm's train.py that meet the model."""

    def __init__(self, folder: Path, scheme: str, resume: Path | None = None) -> None:
        name, options = ALL[scheme]
        torch.manual_seed(0)
        self.model = timm.create_model(
            "siamese_deit_tiny_patch16_224",
            pretrained=False,
            drop_rate=0.1,
            drop_path_rate=0.2,
            drop_block_rate=None,
            bn_momentum=None,
            bn_eps=None,
            scriptable=False,
            checkpoint_path="",
            **SHAPE,
            scheme=name,
            scheme_options=options,
        )
        self.model.set_grad_checkpointing(enable=True)
        self.optimizer = create_optimizer_v2(self.model, "adamw", lr=3e-3, weight_decay=0.1, layer_decay=0.8)
        self.first = 0
        if resume is not None:
            self.first = resume_checkpoint(self.model, str(resume), self.optimizer)
        self.average = ModelEmaV3(self.model, decay=0.9)
        if resume is not None:
            load_checkpoint(self.average.module, str(resume), use_ema=True)
        self.scheduler, _ = create_scheduler_v2(self.optimizer, "cosine", num_epochs=4, warmup_epochs=1)
        self.scheduler.step(self.first)
        args = Namespace(model="siamese_deit_tiny_patch16_224")
        self.saver = CheckpointSaver(
            self.model, self.optimizer, args, self.average, checkpoint_dir=folder, recovery_dir=folder
        )

    def train(self, epochs: int) -> list[float]:
        losses = []
        loss_of = SoftTargetCrossEntropy()
        for epoch in range(self.first, epochs):
            self.model.train()
            for step in range(2):
                torch.manual_seed(10 * epoch + step)
                targets = torch.rand(8, 10).softmax(-1)
                loss = loss_of(self.model(images(8, seed=epoch)), targets)
                self.optimizer.zero_grad()
                loss.backward()
                dispatch_clip_grad(self.model.parameters(), 1.0, "norm")
                self.optimizer.step()
                self.average.update(self.model, step=2 * epoch + step)
                losses.append(loss.item())
            self.scheduler.step(epoch + 1)
            self.saver.save_checkpoint(epoch, metric=float(epoch))
        return losses


@pytest.mark.parametrize("scheme", ["post-pre", "hybrid-pre", "hyper"])
def test_a_resumed_script_goes_on_bit_for_bit(scheme, tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = Script(tmp_path / "whole", scheme)
    losses = whole.train(4)
    first = Script(tmp_path / "parts", scheme)
    assert first.train(2) == losses[:4]
    again = Script(tmp_path / "parts", scheme, resume=tmp_path / "parts" / "checkpoint-1.pth.tar")
    assert again.first == 2
    assert again.train(4) == losses[4:]
    for a, b in ((again.model, whole.model), (again.average.module, whole.average.module)):
        assert a.state_dict().keys() == b.state_dict().keys()
        for name, tensor in b.state_dict().items():
            assert torch.equal(a.state_dict()[name], tensor), name
    assert len(losses) == 8
    assert all(loss < 4 for loss in losses)
    moved = {n for n, p in whole.model.state_dict().items() if "residual" in n or "readout" in n}
    start = Script(tmp_path / "whole", scheme).model.state_dict()
    assert moved
    assert not any(torch.equal(whole.model.state_dict()[n], start[n]) for n in moved)


@pytest.mark.parametrize("scheme", ALL)
def test_every_scheme_has_a_gradient_for_every_parameter(scheme):
    model = rewired("class", scheme).train()
    gradients(model)
    without = {n for n, p in model.named_parameters() if p.grad is None or not (p.grad != 0).any()}
    assert without <= {n for n, _ in model.named_parameters() if dead(n, scheme)}
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


# Weight decay and learning rates


@pytest.mark.parametrize("scheme", ALL)
def test_weight_decay_reaches_timms_matrices_and_what_the_scheme_says(scheme):
    model, plain = rewired("registers", scheme), host("registers")
    decayed, of_timm = decayed_of(model), decayed_of(plain)
    own = {n for n, _ in model.named_parameters()} - {n for n, _ in plain.named_parameters()}
    assert decayed - own == of_timm
    assert len(of_timm) >= 14
    made = hosts.scheme_of(model)
    assert decayed & own == {n for n in own if model.get_parameter(n).ndim > 1 and made.decay(n)}
    assert bool(decayed & own) == (scheme in ("hyper", "mhc"))


def decayed_of(model):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.1)
    return {names[id(p)] for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}


def test_what_the_scheme_and_timm_exempt_by_name():
    model = rewired("registers", "hyper")
    exempt = model.no_weight_decay()
    assert exempt > host("registers").no_weight_decay() > {"pos_embed", "cls_token"}
    assert {n for n in exempt if n.startswith("blocks.1.")} == {
        f"blocks.1.{kind}_residual.static_{part}" for kind in ("attn", "mlp") for part in ("read", "write", "mix")
    }
    assert rewired("class", "post-pre").no_weight_decay() == host().no_weight_decay()


@pytest.mark.parametrize("scheme", ["hybrid-pre", "attnres"])
@pytest.mark.parametrize("form", ["class", "average", "norm-before"])
def test_layers_for_learning_rates(form, scheme):
    """A block's own are with the block, and the readout's with the final norm."""
    model = rewired(form, scheme)
    layers = group_parameters(model, model.group_matcher(coarse=False), reverse=True)
    for name, layer in group_parameters(host(form), host(form).group_matcher(coarse=False), reverse=True).items():
        assert layers.get(name, layer) == layer, name
    for name, _ in model.named_parameters():
        if found := re.match(r"blocks\.(\d)\.", name):
            assert layers[name] == int(found[1]) + 1, name
        if name.startswith("norm."):
            assert layers[name] == layers["blocks.2.mlp.fc1.weight"], name


# Activation checkpoints


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("scheme", SEVERAL)
def test_activation_checkpoints_change_no_gradient(scheme, reentrant):
    model = exact("layer-scale", scheme).train()
    expected = gradients(model)
    model.set_grad_checkpointing()
    assert model.grad_checkpointing
    runs = []
    model.blocks[1].mlp.register_forward_hook(lambda *given: runs.append(1))
    before = timm.layers.use_reentrant_ckpt()
    timm.layers.set_reentrant_ckpt(reentrant)
    try:
        same(live(gradients(model), scheme), live(expected, scheme), 1e-12)
        assert len(runs) == 2
        with capture_streams(model) as streams:
            gradients(model)
        assert all(stream.requires_grad for block in streams for stream in block)
    finally:
        timm.layers.set_reentrant_ckpt(before)
    model.set_grad_checkpointing(False)
    runs.clear()
    gradients(model)
    assert len(runs) == 1


def test_activation_checkpoints_keep_masks_and_dropped_paths():
    model = rewired("class", drop_path_rate=0.5, proj_drop_rate=0.3).double().train()
    x = images(4, dtype=torch.float64)
    results = []
    for enabled in (False, True):
        model.set_grad_checkpointing(enabled)
        torch.manual_seed(2)
        results.append(gradients(model, x, is_causal=True))
    same(*results, 1e-12)


def test_activation_checkpoints_around_the_features():
    model = exact("average", "post-pre")
    x = images(dtype=torch.float64)
    results = []
    for enabled in (False, True):
        model.set_grad_checkpointing(enabled)
        model.zero_grad()
        loss = sum(f.square().mean() for f in model.forward_intermediates(x, intermediates_only=True))
        loss.backward()
        results.append((loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}))
    assert len(results[0][1]) > 40
    same(*results, 1e-12)


# Compilation


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_training_is_one_graph_with_the_same_gradients(recompute):
    torch._dynamo.reset()
    model = rewired("average", "hybrid-pre", depth=2).double()
    model.set_grad_checkpointing(recompute)
    expected = gradients(model)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    got = gradients(compiled)
    got = (got[0], {n.removeprefix("_orig_mod."): g for n, g in got[1].items()})
    same(live(got, "hybrid-pre"), live(expected, "hybrid-pre"), 1e-10)
    assert counter.frame_count == 1


# What changes a model that is there


def test_another_head_and_no_head():
    model = rewired("average")
    tokens = model.forward_features(images())
    model.reset_classifier(5)
    assert model(images()).shape == (2, 5)
    assert torch.equal(model.forward_features(images()), tokens)
    model.reset_classifier(0, "token")
    assert torch.equal(model(images()), model.fc_norm(tokens[:, 0]))


@pytest.mark.parametrize("form", ["class", "average-alone"])
def test_another_image_size(form):
    theirs = host(form).double()
    ours = siamesenorm.rewire(copy.deepcopy(theirs), "pre")
    for model in (ours, theirs):
        model.set_input_size(img_size=48)
    x = images(size=48, dtype=torch.float64)
    assert relative_error(ours(x), theirs(x)) < 1e-12
    model = rewired(form)
    before = model.state_dict()
    model.set_input_size(img_size=48, patch_size=16)
    assert model(images(size=48)).shape == (2, 10)
    changed = {n for n, t in model.state_dict().items() if t.shape != before[n].shape or not torch.equal(t, before[n])}
    assert changed == {"pos_embed", "patch_embed.proj.weight"}


def test_drawing_the_weights_anew():
    """Through a model without memory as well: the norms start as they start, and the scheme's gains apply once."""
    torch.manual_seed(3)
    fresh = timm.create_model("siamese_deit_tiny_patch16_224", **SHAPE, scheme="deepnorm")
    torch.manual_seed(3)
    plain = timm.create_model("vit_tiny_patch16_224", **SHAPE)
    gain = 24**-0.25
    for index in range(3):
        theirs, ours = plain.blocks[index], fresh.blocks[index]
        for a, b, factor in (
            (ours.attn.qkv.weight[:96], theirs.attn.qkv.weight[:96], 1.0),
            (ours.attn.qkv.weight[96:], theirs.attn.qkv.weight[96:], gain),
            (ours.attn.proj.weight, theirs.attn.proj.weight, gain),
            (ours.mlp.fc1.weight, theirs.mlp.fc1.weight, gain),
            (ours.mlp.fc2.weight, theirs.mlp.fc2.weight, gain),
        ):
            torch.testing.assert_close(a, b * factor)
    wanted = fresh.state_dict()
    again = scatter(copy.deepcopy(fresh))
    torch.manual_seed(3)
    again.init_weights()
    redrawn = again.state_dict()
    constant = [n for n in wanted if "norm" in n or (n.endswith("bias") and "patch_embed" not in n)]
    assert len(constant) > 20
    assert all(torch.equal(redrawn[n], wanted[n]) for n in constant)
    scale = [m["blocks.1.attn.proj.weight"].std() for m in (redrawn, wanted)]
    torch.testing.assert_close(*scale, rtol=0.1, atol=0)
    skipped = timm.create_model("siamese_deit_tiny_patch16_224", **SHAPE, scheme="deepnorm", weight_init="skip")
    before = copy.deepcopy(skipped.state_dict())
    skipped.init_weights(needs_reset=False)
    assert torch.equal(skipped.blocks[0].mlp.fc1.weight, before["blocks.0.mlp.fc1.weight"])


def test_rewiring_changes_no_weight_but_on_demand():
    model = siamesenorm.rewire(host(), "deepnorm")
    assert torch.equal(model.blocks[0].mlp.fc1.weight, host().blocks[0].mlp.fc1.weight)
    model = siamesenorm.rewire(host(), "deepnorm", init=True)
    torch.testing.assert_close(model.blocks[0].mlp.fc1.weight, host().blocks[0].mlp.fc1.weight * 24**-0.25)


def test_a_residual_warmup():
    """At step t of T, the output of block l counts min(t / (T·(l+1)), 1)."""
    model = rewired("layer-scale", "pre", options={"warmup_steps": 4}).double()
    scheme = hosts.scheme_of(model)
    assert scheme == make_scheme("pre", warmup_steps=4)
    set_step(model, scheme, 3)
    by_hand = rewired("layer-scale", "pre").double()
    with torch.no_grad():
        for index, block in enumerate(hosts.blocks(by_hand)):
            for scale in (block.ls1, block.ls2):
                scale.gamma.mul_(min(3 / (4 * (index + 1)), 1))
    x = images(dtype=torch.float64)
    assert relative_error(model(x), by_hand(x)) < 1e-12
