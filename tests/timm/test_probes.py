"""Probes of timm's models."""

from __future__ import annotations

import pytest
import timm
import torch

import siamesenorm  # noqa: F401
from siamesenorm.probes import categorical, depth_tables, site_table


@pytest.fixture
def model():
    options = {"img_size": 32, "depth": 3, "num_classes": 5, "init_values": 0.1}
    return timm.create_model("siamese_deit_tiny_patch16_224", scheme_options={"x": "hybrid"}, **options).train()


def test_sites_and_depth(model):
    images, labels = torch.randn(2, 3, 32, 32), torch.tensor([1, 3])
    batch = categorical(lambda: model(images), labels)
    rows, depth = site_table(model, [batch]), depth_tables(model, [batch])
    assert [row["stream"] for row in rows] == ["X", "Y"] * 6
    assert depth.blocks[2]["loss"] == pytest.approx(depth.depths[2]["loss"], rel=1e-6)
    assert model.training
    # A sublayer's parameters are its branch's, its norms', the scheme's and timm's layer scale.
    model.eval()
    (batch.loss(batch.predict()) / 2).backward()
    block = model.blocks[1]
    own = [block.norm2, block.mlp, block.ls2, block.mlp_residual]
    squares = [p.grad.double().square().sum() for part in own for p in part.parameters()]
    assert rows[6]["parameter_grad"] == pytest.approx(torch.stack(squares).sum().sqrt().item(), rel=1e-4)
