"""What is loaded and saved again has the same bytes, for every family and every form that it comes in."""

from __future__ import annotations

import json

import pytest
import torch
from transformers.utils import logging

import siamesenorm
from siamesenorm import hub
from siamesenorm.convert import upcycle
from siamesenorm.hub.loading import load_dit
from tests.hosts import test_dit, test_vision, tiny
from tests.hosts.tiny import FORMS, SCHEMES, host, rewired, scatter

TEXT = {**{family: (family, {}) for family in tiny.FAMILIES}, **FORMS}


def same_files(first, second, load):
    """Save to one folder, load that, save to the other."""
    logging.disable_progress_bar()
    load(first).save_pretrained(second)
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    assert any(name.endswith(".safetensors") for name in names)
    for name in names:
        contents = [(folder / name).read_bytes() for folder in (first, second)]
        if load is load_dit and name == "config.json":
            # diffusers writes down what a model was loaded from.
            contents = [{k: v for k, v in json.loads(each).items() if k != "_name_or_path"} for each in contents]
        assert contents[0] == contents[1], name


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("form", TEXT)
def test_upcycled_language_models(form, tied, tmp_path):
    family, changes = TEXT[form]
    model = scatter(upcycle(host(family, **{**changes, "tie_word_embeddings": tied})), 1)
    model.save_pretrained(tmp_path / "first")
    same_files(tmp_path / "first", tmp_path / "second", hub.load)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("scheme", ["hybrid-pre", "hybridnorm", "peri"])
def test_other_schemes_and_dtypes(scheme, dtype, tmp_path):
    rewired("mixtral" if scheme == "peri" else "qwen3", scheme).to(dtype).save_pretrained(tmp_path / "first")
    same_files(tmp_path / "first", tmp_path / "second", hub.load)


@pytest.mark.parametrize("form", test_vision.FORMS)
@pytest.mark.parametrize("scheme", [*SCHEMES, "upcycled"])
def test_image_classifiers(form, scheme, tmp_path):
    model = upcycle(test_vision.host(form)) if scheme == "upcycled" else test_vision.rewired(form, scheme)
    model.save_pretrained(tmp_path / "first")
    same_files(tmp_path / "first", tmp_path / "second", hub.load)


@pytest.mark.parametrize("kind", ["ours", "rewired", "upcycled", "plain"])
def test_dits(kind, tmp_path):
    model = test_dit.new("siamese", {"x": "hybrid"}) if kind == "ours" else test_dit.stock()
    if kind == "upcycled":
        upcycle(model)
    elif kind == "rewired":
        scatter(siamesenorm.rewire(model, "hyper"), 1)
    model.save_pretrained(tmp_path / "first")
    same_files(tmp_path / "first", tmp_path / "second", load_dit)
