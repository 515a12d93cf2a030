from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from siamesenorm.hosts import families
from siamesenorm.residual import scheme as scheme_module


@pytest.fixture
def _clean(monkeypatch):
    """Forget what a test registers: families, schemes, and what transformers' Auto classes were told of them."""
    from transformers.models.auto import configuration_auto, modeling_auto

    monkeypatch.setattr(families, "_HOSTS", dict(families._HOSTS))
    monkeypatch.setattr(scheme_module, "_REGISTRY", dict(scheme_module._REGISTRY))
    extra = configuration_auto.CONFIG_MAPPING._extra_content
    kept = dict(extra)
    tables = [v._extra_content for v in vars(modeling_auto).values() if hasattr(v, "_extra_content")]
    kept_tables = [dict(table) for table in tables]
    yield
    extra.clear()
    extra.update(kept)
    for table, old in zip(tables, kept_tables, strict=True):
        table.clear()
        table.update(old)


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """A group of this process alone."""
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
