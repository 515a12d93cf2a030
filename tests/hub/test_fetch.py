"""What is downloaded of a model on the hub, by huggingface_hub's own choice among the files of a folder here."""

from __future__ import annotations

import shutil

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects

from siamesenorm import hub
from siamesenorm.convert.saved import upcycle_saved
from siamesenorm.hub.loading import load_dit
from siamesenorm.residual import ConfigError, make_scheme
from tests.hosts import test_dit
from tests.hosts.tiny import host, scatter
from tests.hub.test_security import pipeline


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A folder that stands for a repository: what is in it is copied where it would be downloaded."""
    folder = tmp_path / "repository"

    def snapshot_download(name, *, allow_patterns):
        if name != "someone/model":
            raise OSError("no such repository")
        files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        for file in filter_repo_objects(files, allow_patterns=allow_patterns):
            target = tmp_path / "downloaded" / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / file, target)
        return str(tmp_path / "downloaded")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return folder


def others(folder):
    """What a repository has beside a model in safetensors."""
    for name in ("pytorch_model.bin", "diffusion_pytorch_model.bin", "diffusion_pytorch_model.fp16.safetensors",
                 "consolidated.pth", "modeling_evil.py", "README.md"):  # fmt: skip
        (folder / name).write_bytes(b"x")


def downloaded(path):
    return {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}


def test_a_language_model_in_one_file_or_several(repository):
    model = host("llama")
    model.save_pretrained(repository, max_shard_size="20kB")
    others(repository)
    path = hub.fetch("someone/model")
    names = downloaded(path)
    assert "model.safetensors.index.json" in names
    assert not {name for name in names if not name.startswith(("model", "config.json", "generation_config.json"))}
    assert torch.equal(hub.load(path).lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("form", ["alone", "pipeline"])
def test_a_dit(repository, form, tmp_path):
    model = scatter(test_dit.new("pre", in_channels=3, out_channels=3))
    at = repository if form == "alone" else pipeline(repository) / "transformer"
    model.save_pretrained(at)
    others(repository)
    others(at)
    path = hub.fetch("someone/model")
    kinds = ("config.json", "model_index.json", "diffusion_pytorch_model.safetensors")
    assert not {name for name in downloaded(path) if not name.endswith(kinds)}
    out = tmp_path / "made"
    upcycle_saved(path, out, make_scheme("siamese"))
    assert load_dit(out if form == "alone" else out / "transformer").scheme.y_eps == 1.0


def test_a_name_that_the_hub_does_not_have(repository):
    with pytest.raises(ConfigError, match="there is no folder 'nobody/nothing', and the hub does not give it"):
        hub.fetch("nobody/nothing")
    with pytest.raises(ConfigError, match="it is no name on the hub"):
        hub.fetch("no/such/folder")
