"""The commands on models of images, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.test_commands import refused, run
from tests.training.tiny import tiny
from tests.training.tiny_images import write_recipes

__all__ = ["run", "tiny"]


@pytest.fixture
def recipes(tmp_path):
    write_recipes(tmp_path)
    return tmp_path


def test_a_classifier_goes_through_every_command(run, recipes):
    code, out, err = run("train", recipes / "tiny-vit.yaml", "train.steps=3", "--out", "first")
    assert code == 0
    summary = json.loads(Path("first/summary.json").read_text())
    assert f"accuracy         {summary['val_accuracy']:.2%} of 40 held-out images" in out
    assert "confusion.png   which class was taken for which" in out
    assert "images/s" in out
    assert "next: siamesenorm eval first" in out
    assert "images digits, sha256" in err
    assert "accuracy" in err

    code, out, _ = run("eval", "first", "--json")
    measured = json.loads(out)
    assert (code, measured["val_images"]) == (0, 40)
    assert measured["val_loss"] == pytest.approx(summary["val_loss"], rel=1e-6)
    assert json.loads(run("eval", "first/model", "--json")[1])["val_images"] == 359
    assert "of 10 images" in run("eval", "first", "--images", "10")[1]
    refused(run("eval", "first", "--sequences", "3"), "--sequences is for language models")
    refused(run("eval", "first", "--images", "400"), "--images asks for 400 held-out images, and there are 359")
    refused(run("generate", "first", "--prompt", "a"), "holds an image classifier, which writes no text")
    refused(run("sample", "first"), "holds no diffusion model")

    code, out, _ = run("inspect", "first")
    assert code == 0
    assert "in images of 5 tokens" in out
    assert json.loads(run("inspect", "first/model", "--json")[1])["params"] == summary["params"]


def test_images_of_other_classes_are_refused(run, recipes, tmp_path):
    run("train", recipes / "tiny-vit.yaml", "train.steps=2", "--out", "first")
    for name in range(10):
        folder = tmp_path / "letters" / "abcdefghij"[name]
        folder.mkdir(parents=True)
        for index in range(2):
            Image.fromarray(np.full((8, 8), 20 * name + index, dtype=np.uint8)).save(folder / f"{index}.png")
    refused(
        run("eval", "first", "--source", tmp_path / "letters"), "class 0 of the model is '0', and that of", "is 'a'"
    )


def test_a_diffusion_model_goes_through_every_command(run, recipes):
    code, out, err = run("train", recipes / "tiny-dit.yaml", "train.steps=3", "--out", "first")
    assert code == 0
    summary = json.loads(Path("first/summary.json").read_text())
    assert f"validation loss  {summary['val_loss']:.4f}, squared error" in out
    assert "samples.png     samples of each class, at each guidance scale" in out
    assert "drawing samples at guidance 1, 2" in err

    code, out, _ = run("sample", "first", "--classes", "3, 7", "-n", "3", "--steps", "4", "--out", "made/some.png")
    assert code == 0
    assert "made/some.png: 3 of each class in a row, from above: 3, 7" in out
    picture = Image.open("made/some.png")
    # Eight pixels, each eight pixels a side, with lines between them.
    assert picture.size == (3 * 64 + 4 * 4, 2 * 64 + 3 * 4)
    again = json.loads(run("sample", "first", "--classes", "3,7", "-n", "3", "--steps", "4", "--json")[1])
    assert (again["classes"], again["sampler"], again["guidance"]) == (["3", "7"], "ddim", 2.0)
    assert np.array_equal(np.asarray(Image.open("samples.png")), np.asarray(picture))
    run("sample", "first", "--classes", "3,7", "-n", "3", "--steps", "4", "--seed", "1", "--out", "other.png")
    assert not np.array_equal(np.asarray(Image.open("other.png")), np.asarray(picture))

    refused(run("sample", "first", "--classes", "eleven"), "there is no class 'eleven'")
    refused(run("sample", "first", "--sampler", "dimm"), "did you mean 'ddim'")
    refused(run("sample", "first", "--steps", "51"), "steps must be from 1 to 50")
    refused(run("sample", "first", "--out", "picture.jpg"), "--out must end with .png")
    refused(run("generate", "first", "--prompt", "a"), "siamesenorm sample draws from it")
    refused(run("eval", "first/model"), "without its run")
    refused(run("eval", "first", "--images", "400"), "--images asks for 400 held-out images, and there are 359")
    refused(run("eval", "first", "--source", "digits"), "--source is not for diffusion models")

    measured = json.loads(run("eval", "first", "--json")[1])
    assert measured["val_loss"] == pytest.approx(summary["val_loss"], rel=1e-6)
    assert json.loads(run("inspect", "first", "--json")[1])["params"] == summary["params"]
