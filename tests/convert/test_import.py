"""Official training checkpoints: read as data alone, imported whole, and verified against the official outputs."""

from __future__ import annotations

import argparse
import json
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from siamesenorm import hosts, hub
from siamesenorm.convert.checkpoint import read_checkpoint
from siamesenorm.convert.imported import import_official, verify
from siamesenorm.convert.official import load_official, training_arguments
from siamesenorm.hub.loading import load_dit
from siamesenorm.residual import ConfigError
from tests import parity
from tests.hub.test_security import Touch, little_memory
from tests.parity import load_case, relative_error

__all__ = ["little_memory"]

CASES = {
    "lm_hybridpre_dev_tied": "lm",
    "lm_hybridpre_dev_untied": "lm",
    "lm_hybridnorm_dev": "lm",
    "lm_prenorm_dev": "lm",
    "deit_dev": "deit",
    "dit_dev": "dit",
    "dit_dev_sincos": "dit",
}


def fixture(name: str) -> Path:
    load_case(name)
    return parity.folder() / f"{name}.json"


def official(name: str):
    return load_case(name).group("param/")


def refused(match, run, *args, **kwargs):
    with pytest.raises(ConfigError, match=match) as error:
        run(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


# Import


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_is_imported_and_verified(name, tmp_path):
    kind = CASES[name]
    others = {"optimizer": {"state": {0: {"step": torch.tensor(3.0)}}}, "epoch": 7}
    averaged = {key: torch.zeros_like(value) for key, value in official(name).items()}
    part, parts = {
        "lm": ("model", {}),
        "deit": ("model", {"model_ema": averaged}),
        "dit": ("ema", {"model": averaged}),
    }[kind]
    file = tmp_path / "checkpoint.pt"
    torch.save({part: official(name), **parts, **others, "args": argparse.Namespace(lr=1e-4)}, file)
    made = import_official(file, tmp_path / "out", kind, fixture=fixture(name))
    assert made.checkpoint.part == part
    assert set(made.checkpoint.left) == {*parts, *others}
    assert made.arguments_from == str(fixture(name))
    assert made.verified.relative < 2e-5
    again = load_dit(tmp_path / "out") if kind == "dit" else hub.load(tmp_path / "out")
    assert verify(again, kind, fixture(name).with_suffix(".safetensors")).relative < 2e-5
    assert hosts.scheme_in(again).name == {"lm_hybridnorm_dev": "hybridnorm", "lm_prenorm_dev": "pre"}.get(
        name, "siamese"
    )


@pytest.mark.parametrize("form", ["alone", "safetensors", "wrapped", "compiled"])
def test_forms_of_a_file(form, tmp_path):
    name = "lm_prenorm_dev"
    weights = official(name)
    if form == "wrapped":
        weights = {f"module._fsdp_wrapped_module.{key}": value for key, value in weights.items()}
    if form == "compiled":
        weights = {f"_orig_mod.{key}": value for key, value in weights.items()}
    file = tmp_path / ("model.safetensors" if form == "safetensors" else "model.pt")
    save_file(weights, file) if form == "safetensors" else torch.save(weights, file)
    found = read_checkpoint(file, "lm")
    assert (found.part, found.left, found.arguments) == ("", (), None)
    assert found.weights.keys() == official(name).keys()
    assert all(torch.equal(found.weights[key], value) for key, value in official(name).items())


def test_arguments_are_found_in_that_order(tmp_path):
    name = "lm_prenorm_dev"
    args = load_case(name).args
    file = tmp_path / "model.pt"
    torch.save(official(name), file)
    message = refused("neither with the weights", import_official, file, tmp_path / "out", "lm")
    assert "--args FILE" in message
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"run_name": "x", "model": dict(args)}))
    made = import_official(file, tmp_path / "beside", "lm")
    assert (made.arguments, made.arguments_from) == (args, str(tmp_path / "config.yaml"))
    assert made.verified is None
    for path, content in (
        (tmp_path / "args.json", json.dumps(args)),
        (tmp_path / "args.yaml", yaml.safe_dump(dict(args))),
        (tmp_path / "case.json", json.dumps({"constructor_args": args})),
    ):
        path.write_text(content)
        made = import_official(file, tmp_path / f"by-{path.name}", "lm", arguments=path)
        assert (made.arguments, made.arguments_from) == (args, str(path))


def test_arguments_of_the_training_scripts():
    given = {"model": "DiT-B/2", "image_size": 256, "num_classes": 1000, "lr": 1e-4}
    assert training_arguments("dit", given) == {
        "input_size": 32,
        "patch_size": 2,
        "hidden_size": 768,
        "depth": 12,
        "num_heads": 12,
        "num_classes": 1000,
    }
    found = training_arguments("dit", {**given, "model": "DiT-L/4"})
    assert (found["depth"], found["hidden_size"], found["num_heads"], found["patch_size"]) == (24, 1024, 16, 4)
    given = {"model": "deit_small_distilled_patch16_224", "input_size": 224, "nb_classes": 1000, "drop_path": 0.1}
    assert training_arguments("deit", given) == {
        "img_size": 224,
        "patch_size": 16,
        "embed_dim": 384,
        "num_heads": 6,
        "num_classes": 1000,
        "distilled": True,
        "drop_rate": 0.0,
        "drop_path_rate": 0.1,
    }
    for kind, unknown in (("dit", {"model": "DiT-Q/2"}), ("deit", {"model": "deit_huge_patch16_224"}), ("lm", {})):
        assert training_arguments(kind, {**given, **unknown}) is None


def test_what_is_missing_and_left_over_is_listed_and_nothing_is_written(tmp_path):
    name = "deit_dev"
    weights = official(name)
    weights["surplus.weight"] = weights.pop("blocks.1.post_norm1.weight")
    torch.save({"model": weights}, tmp_path / "checkpoint.pt")
    message = refused(
        "do not fit", import_official, tmp_path / "checkpoint.pt", tmp_path / "out", "deit", fixture=fixture(name)
    )
    assert "missing: blocks.1.post_norm1.weight" in message
    assert "not used: surplus.weight" in message
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_an_output_that_is_not_the_fixtures_is_not_written(tmp_path):
    name = "lm_hybridpre_dev_tied"
    weights = official(name)
    weights["transformer.blocks.1.c1"] = weights["transformer.blocks.1.c1"] * 1.01
    torch.save(weights, tmp_path / "model.pt")
    refused("the output is not that in", import_official, tmp_path / "model.pt", tmp_path / "out", "lm",
            fixture=fixture(name))  # fmt: skip
    assert not (tmp_path / "out").exists()
    refused("no fixture for the kind 'dit'", verify, None, "dit", fixture(name))
    refused("there is no fixture", verify, None, "lm", tmp_path / "nothing.json")


def test_requests_that_are_wrong(tmp_path):
    name = "dit_dev"
    file = tmp_path / "checkpoint.pt"
    torch.save({"ema": official(name), "model": official(name)}, file)
    refused("did you mean 'deit'", import_official, file, tmp_path / "out", "det")
    refused("did you mean 'ema'", read_checkpoint, file, "dit", "emma")
    assert read_checkpoint(file, "dit", "model").left == ("ema",)
    torch.save(official(name), file)
    refused("holds weights alone", read_checkpoint, file, "dit", "ema")
    torch.save({"epoch": 3}, file)
    refused("holds no weights; its parts are epoch", read_checkpoint, file, "dit")
    torch.save([1, 2], file)
    refused("holds a list", read_checkpoint, file, "dit")
    refused("there is no file", read_checkpoint, tmp_path / "nothing.pt", "dit")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    refused("is not an empty folder", import_official, file, tmp_path / "full", "dit", fixture=fixture(name))
    assert (tmp_path / "full" / "mine").exists()


# Files that do harm


def test_a_pickle_with_code_is_refused(tmp_path):
    mark = tmp_path / "mark"
    for index, content in enumerate(
        ({"model": official("deit_dev"), "hook": Touch(mark)}, Touch(mark), {"model": {"a": Touch(mark)}})
    ):
        file = tmp_path / f"{index}.pt"
        torch.save(content, file)
        message = refused("holds more than data: loading it would run", read_checkpoint, file, "deit")
        assert "posix.mkdir" in message
    # What DeiT and DiT keep of their command line is data.
    torch.save({"model": official("deit_dev"), "args": argparse.Namespace(hook=Touch(mark))}, tmp_path / "args.pt")
    refused("would run posix.mkdir", read_checkpoint, tmp_path / "args.pt", "deit")
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(Touch(mark)))
    refused("no checkpoint as torch.save", read_checkpoint, tmp_path / "bare.pt", "deit")
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    refused("no checkpoint as torch.save", read_checkpoint, tmp_path / "old.pt", "deit")
    assert not mark.exists()


def rewritten(tmp_path, *, compress=zipfile.ZIP_STORED, pickled=lambda content: content, extra=None):
    """A small checkpoint whose archive is written anew, with changes."""
    torch.save({"a": torch.arange(7.0)}, tmp_path / "source.pt")
    with zipfile.ZipFile(tmp_path / "source.pt") as source, zipfile.ZipFile(
        tmp_path / "made.pt", "w", compress
    ) as made:  # fmt: skip
        for entry in source.infolist():
            content = source.read(entry)
            made.writestr(entry.filename, pickled(content) if entry.filename.endswith("data.pkl") else content)
        if extra is not None:
            made.writestr(extra, b"content")
    return tmp_path / "made.pt"


def test_archives_that_are_not_torchs(tmp_path, little_memory):
    assert torch.equal(read_checkpoint(rewritten(tmp_path), "lm").weights["a"], torch.arange(7.0))
    for name in ("../../outside", "/etc/outside", "source/../../outside", "..\\outside", "C:\\outside", "./"):
        refused("points out of the archive", read_checkpoint, rewritten(tmp_path, extra=name), "lm")
    refused("is compressed", read_checkpoint, rewritten(tmp_path, compress=zipfile.ZIP_DEFLATED), "lm")
    (tmp_path / "cut.pt").write_bytes(rewritten(tmp_path).read_bytes()[:400])
    refused("no checkpoint as torch.save", read_checkpoint, tmp_path / "cut.pt", "lm")


def test_tensors_that_say_that_they_are_large(tmp_path, little_memory):
    seven, many = b"K\x07\x85", b"\x8a\x06\x00\x00\x00\x00\x00\x01\x85"
    made = rewritten(tmp_path, pickled=lambda content: content.replace(seven, many))
    assert many in zipfile.ZipFile(made).read("source/data.pkl")
    refused("cannot read|is not in it", read_checkpoint, made, "lm")
    # Of one number, which is repeated as often as it is asked for.
    torch.save({"a": torch.ones(1).expand(10**12)}, tmp_path / "view.pt")
    refused(r"says that 'a' has the shape \(1000000000000,\)", read_checkpoint, tmp_path / "view.pt", "lm")
    torch.save({"a": torch.eye(3).to_sparse()}, tmp_path / "sparse.pt")
    refused("cannot read|in a form that is not plain", read_checkpoint, tmp_path / "sparse.pt", "lm")


class OfSize:
    """Is made as large as a pickle says."""

    def __init__(self, make, size):
        self.made = (make, (size,))

    def __reduce__(self):
        return self.made


@pytest.mark.parametrize("make", [bytearray, torch.FloatTensor, torch.UntypedStorage])
def test_a_pickle_that_makes_what_is_not_in_it(make, tmp_path, little_memory):
    torch.save({"model": official("deit_dev"), "more": OfSize(make, 1)}, tmp_path / "x.pt")
    refused(f"it makes .*{make.__name__}, of any size", read_checkpoint, tmp_path / "x.pt", "deit")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deit_dev", {"num_classes": 10**9}),
        ("deit_dev", {"img_size": 160_000}),
        ("dit_dev", {"num_classes": 10**9}),
        ("dit_dev", {"input_size": 10**6}),
        ("dit_dev", {"depth": 10**9}),
        ("lm_prenorm_dev", {"n_layers": 10**8}),
        ("lm_prenorm_dev", {"vocab_size": 10**9, "embedding_size": 10**9}),
    ],
)
def test_arguments_that_ask_for_more_than_the_weights(name, changes, tmp_path, little_memory):
    given = {**load_case(name).args, **changes}
    message = refused("", load_official, official(name), CASES[name], given)
    assert "which its weights have not" in message or "its config asks for" in message, message


def test_arguments_and_weights_of_another_type():
    given = load_case("lm_prenorm_dev").args
    for changes in ({"mlp_hidden_size": "x"}, {"rope_theta": "x"}, {"rope_theta": None}):
        refused("must be a number", load_official, official("lm_prenorm_dev"), "lm", {**given, **changes})
    whole = {key: value.to(torch.int64) for key, value in official("deit_dev").items()}
    given = load_case("deit_dev").args
    refused("has the dtype torch.int64", load_official, whole, "deit", given)


def test_a_safetensors_file_whose_header_lies(tmp_path, little_memory):
    from tests.hub.test_security import LIES, write_lie

    for lie in LIES:
        refused("no whole safetensors file", read_checkpoint, write_lie(tmp_path / "x.safetensors", lie), "lm")


def test_an_official_model_that_is_upcycled(tmp_path):
    """The two ways in together: a Pre-Norm model of the official code goes on as SiameseNorm."""
    from siamesenorm.convert.saved import upcycle_saved
    from siamesenorm.residual import make_scheme

    name = "lm_prenorm_dev"
    torch.save(official(name), tmp_path / "model.pt")
    import_official(tmp_path / "model.pt", tmp_path / "pre", "lm", fixture=fixture(name))
    made = upcycle_saved(tmp_path / "pre", tmp_path / "siamese", make_scheme("siamese"))
    assert made.difference.relative < 1e-4
    model, case = hub.load(tmp_path / "siamese"), load_case(name)
    found = model(input_ids=case.tensors["input/tokens"]).logits
    assert relative_error(found, case.tensors["output/logits"]) < 1e-4
