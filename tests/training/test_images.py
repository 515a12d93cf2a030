"""Whole runs on images: what is on disk after one, that breaking one off changes nothing, and what is refused."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification

from siamesenorm import hosts
from siamesenorm.data import images
from siamesenorm.residual import ConfigError
from siamesenorm.training import augment, sampling
from siamesenorm.training.engine import ImageLoader
from siamesenorm.training.normalise import Normalise
from siamesenorm.training.processes import ALONE
from siamesenorm.training.recipe_files import load
from siamesenorm.training.run import train
from siamesenorm.training.run_folder import read_metrics
from siamesenorm.training.tasks import task_of
from siamesenorm.training.tasks.classification import ClassObjective
from siamesenorm.training.tasks.images import PixelBatches
from tests.training.test_distributed import run_all
from tests.training.test_run import Killed, assert_same, kill, weights
from tests.training.tiny import Watcher
from tests.training.tiny_images import write_recipes

KINDS = ("tiny-vit", "tiny-dit")


@pytest.fixture
def recipe(tmp_path):
    write_recipes(tmp_path)
    return lambda name, *overrides: load(str(tmp_path / f"{name}.yaml"), overrides)


def picture(path):
    return np.asarray(Image.open(path).convert("L"), dtype=float)


def test_a_classifiers_run(recipe, tmp_path):
    result = train(recipe("tiny-vit"), tmp_path / "run", Watcher())
    summary, folder = result.summary, tmp_path / "run"
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["images"] for line in lines] == [400 * step for step in range(1, 8)]
    # Four patches and the class token.
    assert [line["tokens"] for line in lines] == [2000 * step for step in range(1, 8)]
    assert [line["step"] for line in lines if "val_accuracy" in line] == [3, 6, 7]
    assert summary["val_accuracy"] == lines[-1]["val_accuracy"]
    assert (summary["images"], summary["val_images"], summary["mistakes_of"]) == (2800, 40, 359)
    assert all(picture(folder / name).std() > 10 for name in ("confusion.png", "mistakes.png", "loss.png"))

    # What is saved is the average that was validated, and knows its classes and how it wants its images.
    model = AutoModelForImageClassification.from_pretrained(folder / "model").eval()
    assert type(model).__name__ == "ResidualViTForImageClassification"
    assert model.config.id2label == {index: str(index) for index in range(10)}
    found = images.prepare("digits").validation
    numbers = np.arange(40) * len(found) // 40
    pixels, labels = found.batch(numbers)
    with torch.no_grad():
        logits = model(pixel_values=torch.from_numpy(pixels).float() / 127.5 - 1).logits
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels))
    assert summary["val_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert summary["val_accuracy"] == (logits.argmax(-1).numpy() == labels).mean()
    processor = json.loads((folder / "model" / "preprocessor_config.json").read_text())
    assert (processor["image_mean"], processor["size"]) == ([0.5], {"height": 8, "width": 8})


def test_a_diffusion_models_run(recipe, tmp_path):
    from diffusers import DiTPipeline

    folder = tmp_path / "run"
    summary = train(recipe("tiny-dit"), folder, Watcher()).summary
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["images"] for line in lines] == [400 * step for step in range(1, 8)]
    assert all(line["variational"] > 0 for line in lines)
    assert summary["val_loss"] < 1.05
    assert summary["val_variational"] > 0
    assert picture(folder / "samples.png").std() > 10
    pipeline = DiTPipeline.from_pretrained(folder / "model")
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline([3, 4], num_inference_steps=3, guidance_scale=2.0, output_type="np").images
    assert made.shape == (2, 8, 8, 1)
    assert sampling.class_names(pipeline) == [str(index) for index in range(10)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [*(pytest.param(at, marks=pytest.mark.slow) for at in (2, 4)), 5])
def test_a_run_that_is_broken_off_is_the_same_in_the_end(recipe, tmp_path, monkeypatch, kind, at):
    # timm's erasing draws from Python's generator.
    monkeypatch.setattr(augment, "eraser", lambda *_: lambda images: images * random.random())
    made = recipe(kind, *([] if kind == "tiny-vit" else ["sample.per_class=0"]))
    train(made, tmp_path / "unbroken", Watcher())
    with pytest.raises(Killed):
        train(made, tmp_path / "broken", Watcher(at=at, act=kill))
    watcher = Watcher()
    train(made, tmp_path / "broken", watcher)
    assert watcher.begun == [at - at % 2 if at % 2 else at - 2]
    assert_same(tmp_path / "broken", tmp_path / "unbroken")


@pytest.mark.slow
def test_two_processes_resume_the_same_and_give_what_one_gives(recipe, tmp_path):
    still = ["model.config.hidden_dropout_prob=0.0", "model.config.drop_path_rate=0.0", "augment.shift=0"]
    todo = []
    for name in KINDS:
        # What is drawn at random is drawn by each process for itself.
        plain = still if name == "tiny-vit" else ["sample.per_class=0"]
        for how in ("fsdp", "ddp"):
            changes = [*plain, f"train.parallel={how}"]
            todo += [
                {"recipe": f"{name}.yaml", "overrides": changes, "out": f"unbroken/{name}-{how}"},
                {
                    "recipe": f"{name}.yaml",
                    "overrides": changes,
                    "out": f"broken/{name}-{how}",
                    "at": 4,
                    "signal": "SIGTERM",
                },
                {"recipe": f"{name}.yaml", "overrides": changes, "out": f"broken/{name}-{how}"},
            ]
    run_all(tmp_path, todo)
    for name in KINDS:
        for how in ("fsdp", "ddp"):
            assert_same(tmp_path / f"broken/{name}-{how}", tmp_path / f"unbroken/{name}-{how}")
    train(recipe("tiny-vit", *still), tmp_path / "alone", Watcher())
    alone = weights(tmp_path / "alone")
    for how in ("fsdp", "ddp"):
        together = weights(tmp_path / f"unbroken/tiny-vit-{how}")
        for name, weight in alone.items():
            torch.testing.assert_close(together[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_the_average_is_validated_and_saved(recipe, tmp_path):
    averaged = train(recipe("tiny-vit"), tmp_path / "average", Watcher()).summary
    plain = train(recipe("tiny-vit", "train.ema_decay=null"), tmp_path / "plain", Watcher()).summary
    assert averaged["train_loss"] == plain["train_loss"]
    assert averaged["val_loss"] != plain["val_loss"]
    ours, theirs = weights(tmp_path / "average"), weights(tmp_path / "plain")
    assert not any(torch.equal(ours[name], theirs[name]) for name in ours if name.endswith("fc1.weight"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("tiny-vit", "train.compile=true"),
        ("tiny-vit", "train.activation_checkpointing=true"),
        ("tiny-dit", "train.activation_checkpointing=true"),
        ("tiny-vit", "train.micro_batch_size=100"),
        ("tiny-dit", "train.micro_batch_size=100"),
    ],
)
def test_how_it_is_computed_changes_nothing(recipe, tmp_path, kind, how):
    off = {
        "tiny-vit": ["model.config.hidden_dropout_prob=0.0", "model.config.drop_path_rate=0.0"],
        "tiny-dit": ["sample.per_class=0"],
    }[kind]
    losses = []
    for name, more in (("plain", []), ("other", [how])):
        folder = train(recipe(kind, *off, "train.steps=2", *more), tmp_path / name, Watcher()).folder
        losses.append([line["loss"] for line in read_metrics(folder.metrics)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_images_are_looked_through_once(recipe, tmp_path, monkeypatch, kind):
    looks, prepare = [], images.prepare
    monkeypatch.setattr(images, "prepare", lambda *args, **kwargs: looks.append(args) or prepare(*args, **kwargs))
    more = ["train.steps=2"] + (["sample.per_class=0"] if kind == "tiny-dit" else [])
    for folder in ("first", "second"):
        train(recipe(kind, *more), tmp_path / folder, Watcher())
    # Not kept from one run to the next, as the images may have changed.
    assert len(looks) == 2


REFUSED = {
    "tiny-vit": [
        ("model.host=llama", "its hosts are deit, vit"),
        ("model.config.patch_size=3", "patch_size 3 does not divide image_size 8"),
        ("model.config.num_labels=7", "num_labels is 7, and digits has 10 classes"),
        ("model.config.image_size=16", "model.config.image_size is 16, and the data says 8"),
        ("data.mean=[0.1,0.2]", "data.mean has 2 numbers for 1 channels"),
        ("data.std=0", "data.std must be above 0"),
        ("data.channels=2", "data.channels must be one of 1, 3"),
        ("data.validation_images=360", "asks for 360 held-out images, and there are 359"),
        ("train.batch_size=2000", "asks for more images than there are to train on"),
        ("augment.shift=8", "moves images of 8 pixels out of sight"),
        ("train.ema_decay=1.0", "train.ema_decay must be at least 0 and below 1"),
        ("data.sha256=abc", "not those that data.sha256 asks for"),
        ("data.sequence_length=3", "belongs to the task causal-lm"),
        ("diffusion.timesteps=3", "belongs to the task class-conditional-diffusion"),
        ("task=causal-lm", "unknown key 'augment' in the recipe; it belongs to the task image-classification"),
        ("data.source=digit", "there is no file or folder digit; images are 'digits'"),
        ("model.pretrained=no/such/folder", "there is no such folder"),
    ],
    "tiny-dit": [
        ("model.host=vit", "its hosts are dit"),
        ("model.scheme=peri", "peri"),
        ("sample.sampler=dimm", "did you mean 'ddim'"),
        ("sample.steps=51", r"sample.steps \(51\) exceeds diffusion.timesteps \(50\)"),
        ("diffusion.prediction=epsilom", "did you mean 'epsilon'"),
        ("diffusion.label_dropout=0", "which cannot be guided"),
        ("model.config.sample_size=4", "sample_size is 4, and the data says 8"),
        ("sample.guidance=-1", "sample.guidance must be numbers of at least 0"),
        ("sample.distance_images=1", "must be 0 or at least 2"),
        ("diffusion.beta_end=2", "diffusion.beta_end must be at least 0 and below 1"),
    ],
}


@pytest.mark.parametrize(("kind", "override", "message"), [(k, *each) for k in REFUSED for each in REFUSED[k]])
def test_what_is_refused(recipe, tmp_path, kind, override, message):
    with pytest.raises(ConfigError, match=message):
        train(recipe(kind, override), tmp_path / "run", Watcher())
    assert not (tmp_path / "run").exists()


def test_augmentation_of_timm_says_what_it_needs(recipe, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "timm.data", None)
    for override in (
        "augment.mixup=0.8",
        "augment.auto_augment=rand-m9",
        "augment.erase=0.5",
        "augment.random_crop=0.1",
    ):
        with pytest.raises(ConfigError, match=r'come from timm: pip install "siamesenorm\[timm\]"'):
            train(recipe("tiny-vit", override), tmp_path / "run", Watcher())


def cats_and_dogs(folder):
    generator = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for index in range(20):
            bright = 60 if name == "cat" else 190
            pixels = generator.integers(bright - 50, bright + 50, (12, 9, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")


def test_what_the_distance_lacks_is_missed_at_the_beginning(recipe, tmp_path):
    cats_and_dogs(tmp_path / "set")
    wanted = ["sample.distance_images=4"]
    few = [f"data.source={tmp_path / 'set'}", "data.validation_images=null", "train.batch_size=8"]
    with pytest.raises(ConfigError, match=r"vit-tiny cannot be trained on these images.*train.batch_size \(64\)"):
        train(recipe("tiny-dit", *wanted, *few), tmp_path / "run", Watcher())
    colour = {"image_size": 8, "num_channels": 3, "patch_size": 4, "hidden_size": 8, "num_hidden_layers": 1}
    hosts.build("vit", colour | {"num_attention_heads": 1, "intermediate_size": 8}, "pre").save_pretrained(
        tmp_path / "colour"
    )
    Normalise((0.5,), (0.5,)).save(tmp_path / "colour", 8, 3)
    wanted.append(f"sample.classifier={tmp_path / 'colour'}")
    with pytest.raises(ConfigError, match="takes images of 3 channels, not 1"):
        train(recipe("tiny-dit", *wanted), tmp_path / "run", Watcher())
    assert not (tmp_path / "run").exists()


def test_a_model_that_cannot_be_guided_is_not_said_to_be(recipe):
    made = recipe("tiny-dit", "diffusion.label_dropout=0", "sample.guidance=1")
    assert task_of(made).next_command(Path("a")) == "siamesenorm sample a --guidance 1"


def test_an_odd_share_of_a_batch_cannot_be_mixed():
    objective = ClassObjective(Normalise((0.5,), (0.5,)), torch.device("cpu"), mix=lambda *batch: batch)
    batch = {"images": torch.zeros(3, 1, 2, 2), "labels": torch.zeros(3, dtype=torch.long)}
    with pytest.raises(ConfigError, match="pair images; a process's share of 3 is odd"):
        objective.prepare(batch)


def test_a_signal_to_the_workers_does_not_end_them(tmp_path):
    digits = images.prepare("digits")
    loader = ImageLoader(PixelBatches(digits.train, digits.sha256, workers=1), 100, 0, tmp_path, ALONE)
    loader.reshuffle(1)
    batches = iter(loader)
    first = next(batches)
    for worker in multiprocessing.active_children():
        os.kill(worker.pid, signal.SIGTERM)
    # More than the worker has read ahead.
    assert len([first, *batches]) == 14


def test_images_of_a_folder_are_read_by_workers(recipe, tmp_path):
    cats_and_dogs(tmp_path / "set")
    changes = [
        f"data.source={tmp_path / 'set'}",
        "data.channels=3",
        "data.validation_images=null",
        "train.batch_size=8",
    ]
    more = ["train.steps=12", "data.flip=true"]
    alone = train(recipe("tiny-vit", *changes, *more), tmp_path / "alone", Watcher()).summary
    helped = train(recipe("tiny-vit", *changes, *more, "data.workers=2"), tmp_path / "helped", Watcher()).summary
    assert alone["val_loss"] == helped["val_loss"]
    assert alone["classes"] == 2
    processor = AutoImageProcessor.from_pretrained(tmp_path / "alone" / "model", use_fast=False)
    assert list(processor.image_mean) == [0.5, 0.5, 0.5]
