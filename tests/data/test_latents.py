"""Latents of images: what is stored, what is read, going on after a sudden end, and what is refused."""

import dataclasses
import errno
import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from siamesenorm.cli import main
from siamesenorm.data import autoencoders, encode, files, folders, images, latents
from siamesenorm.data.encode import Request
from siamesenorm.residual import ConfigError
from tests.data.watching import Silent

diffusers = pytest.importorskip("diffusers")

SIZE = 16
SHIFT, SCALE = 0.1, 0.5


def variational(**more):
    torch.manual_seed(1)
    return diffusers.AutoencoderKL(
        **{
            "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
            "block_out_channels": (4, 8), "norm_num_groups": 2, "latent_channels": 3, "sample_size": SIZE,
            "scaling_factor": SCALE, "shift_factor": SHIFT, **more,
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Autoencoders with random weights, by name, and their folders."""
    root = tmp_path_factory.mktemp("autoencoders")
    made = {"kl": variational(), "grey": variational(in_channels=1, out_channels=1)}
    torch.manual_seed(2)
    made["tiny"] = diffusers.AutoencoderTiny(
        encoder_block_out_channels=(4, 4), decoder_block_out_channels=(4, 4), num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1), latent_channels=2,
    )  # fmt: skip
    made["vq"] = diffusers.VQModel(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(4, 8), norm_num_groups=2, latent_channels=3,
    )  # fmt: skip
    made["dc"] = diffusers.AutoencoderDC(
        latent_channels=4, attention_head_dim=2, encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8), encoder_qkv_multiscales=((), (5,)), decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1), downsample_block_type="conv",
        upsample_block_type="interpolate", decoder_norm_types="rms_norm", decoder_act_fns="silu", scaling_factor=0.3,
    )  # fmt: skip
    for name, model in made.items():
        model.eval().save_pretrained(root / name)
    made["kl"].save_pretrained(root / "pipeline" / "vae")
    return root, made


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SIAMESENORM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def source(tmp_path):
    """A folder of 12 + 12 images to train on, of two classes, and 4 + 4 to validate on."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for side, count in (("train", 12), ("val", 4)):
        for name in ("cat", "dog"):
            folder = tmp_path / "images" / side / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(rng.integers(0, 256, (20, 18, 3), dtype=np.uint8)).save(folder / f"{number:02d}.png")
    return tmp_path / "images"


@pytest.fixture
def run(tmp_path, source, models):
    """Encodes the source into a folder of tmp_path."""

    def call(out="out", autoencoder="kl", watcher=None, **more):
        wanted = {"image_size": SIZE, "batch_size": 4, "shard_size": 10, "device": "cpu", "dtype": "float32", **more}
        request = Request(str(wanted.pop("source", source)), str(models[0] / autoencoder), **wanted)
        return encode.encode(request, tmp_path / out, watcher or Silent())

    return call


def pixels_of(source, channels=3):
    found = images.prepare(str(source), image_size=SIZE, channels=channels, watcher=Silent())
    return {
        side: torch.from_numpy(getattr(found, side).batch(range(len(getattr(found, side))))[0]).float() / 127.5 - 1
        for side in ("train", "validation")
    }, found


def posterior(model, pixels):
    with torch.no_grad():
        return model.encode(pixels).latent_dist


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(words, call, *arguments, **more):
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **more)
    for word in [words] if isinstance(words, str) else words:
        assert word in str(caught.value)


def test_latents_are_sampled_as_diffusers_does(run, source, models):
    done = run()
    pixels, found = pixels_of(source)
    arrays = latents.prepare(done.arrays.folder)
    assert arrays.sha256 == done.arrays.sha256
    assert (arrays.classes, arrays.latent_shape) == (("cat", "dog"), (3, 8, 8))
    assert arrays.encoded.source_sha256 == found.sha256
    for side in ("train", "validation"):
        split = getattr(arrays, side)
        assert (split.labels == getattr(found, side).labels).all()
        assert len(split) == len(pixels[side])
        dist = posterior(models[1]["kl"], pixels[side])
        order = np.random.default_rng(1).permutation(len(split))
        # Without a generator, the means.
        batch, labels = split.batch(order)
        assert (batch.dtype, labels.dtype) == (np.float32, np.int64)
        assert (labels == split.labels[order]).all()
        torch.testing.assert_close(torch.from_numpy(batch), ((dist.mean - SHIFT) * SCALE)[order], rtol=1e-4, atol=1e-5)
        # The same numbers as diffusers draws, for a batch of the same images.
        dist = posterior(models[1]["kl"], pixels[side][order])
        drawn = (dist.sample(torch.Generator().manual_seed(5)) - SHIFT) * SCALE
        batch, _ = split.batch(order, torch.Generator().manual_seed(5))
        torch.testing.assert_close(torch.from_numpy(batch), drawn, rtol=1e-4, atol=1e-5)
        assert not np.allclose(batch, split.batch(order)[0], atol=1e-2)
    with pytest.raises(IndexError):
        arrays.train.batch([24])
    assert (arrays.train.batch([-1])[0] == arrays.train.batch([23])[0]).all()
    assert arrays.train.batch([])[0].shape == (0, 3, 8, 8)
    copy = pickle.loads(pickle.dumps(arrays))
    assert (copy.train.batch([3, 17])[0] == arrays.train.batch([3, 17])[0]).all()
    assert len(pickle.dumps(arrays.train)) < 24 * 3 * 64 * 4


def test_what_is_in_a_shard(run, source, models):
    from safetensors.numpy import load_file

    folder = run(dtype="float16", flip=True).arrays.folder
    pixels, _ = pixels_of(source)
    meta = json.loads((folder / "latents.json").read_text())
    assert [shard["images"] for shard in meta["train"]["shards"]] == [10, 10, 4]
    assert [shard["images"] for shard in meta["validation"]["shards"]] == [8]
    assert sorted(content(folder)) == sorted(
        ["latents.json", *(f"train-0000{number}.safetensors" for number in range(3)), "validation-00000.safetensors"]
    )
    shards = [load_file(folder / shard["file"]) for shard in meta["train"]["shards"]]
    whole = {name: np.concatenate([shard[name] for shard in shards]) for name in shards[0]}
    assert whole["labels"].tolist() == [0] * 12 + [1] * 12
    for suffix, each in (("", pixels["train"]), ("_flipped", pixels["train"].flip(-1))):
        dist = posterior(models[1]["kl"], each)
        for name in ("mean", "logvar"):
            exact, stored = getattr(dist, name), torch.from_numpy(whole[name + suffix])
            assert stored.dtype == torch.float16
            # Half a unit in the last place of float16, and what the size of a batch does in float32.
            torch.testing.assert_close(stored.float(), exact, rtol=2**-11 + 1e-4, atol=1e-5)
    assert meta["autoencoder_config"]["scaling_factor"] == SCALE
    assert meta["autoencoder"] == str(models[0] / "kl")
    assert (meta["scale"], meta["shift"]) == ([SCALE] * 3, [SHIFT] * 3)


def test_flips_are_chosen_by_the_generator(run):
    arrays = run(flip=True).arrays
    plain = run(out="plain").arrays
    from safetensors.numpy import load_file

    stored = load_file(arrays.folder / "train-00000.safetensors")
    generator = torch.Generator().manual_seed(3)
    batch, _ = arrays.train.batch(range(10), generator)
    # The documented order of what is drawn.
    generator = torch.Generator().manual_seed(3)
    coins = torch.randint(2, (10,), generator=generator).numpy().astype(bool)
    noise = torch.randn(10, 3, 8, 8, generator=generator).numpy()
    assert 0 < coins.sum() < 10
    mean, logvar = (
        np.where(coins[:, None, None, None], stored[f"{name}_flipped"], stored[name]) for name in ("mean", "logvar")
    )
    np.testing.assert_allclose(batch, (mean + np.exp(logvar / 2) * noise - SHIFT) * SCALE, rtol=1e-5, atol=1e-6)
    assert (arrays.train.batch(range(24))[0] == plain.train.batch(range(24))[0]).all()
    assert arrays.sha256 != plain.sha256


def test_samples_have_the_distribution_that_the_encoder_gave(run, source, models):
    split = run(dtype="float16").arrays.train
    dist = posterior(models[1]["kl"], pixels_of(source)[0]["train"][:1])
    generator = torch.Generator().manual_seed(0)
    draws = torch.cat([torch.from_numpy(split.batch([0] * 500, generator)[0]) for _ in range(4)]).double()
    count = len(draws)
    mean, std = (dist.mean[0].double() - SHIFT) * SCALE, dist.std[0].double() * SCALE
    # Of 192 numbers, none is further than five standard errors off, plus the rounding of float16.
    rounding = 2**-11 * (dist.mean[0].abs() + dist.std[0] * dist.logvar[0].abs()) * SCALE
    assert ((draws.mean(0) - mean).abs() <= 5 * std / count**0.5 + rounding).all()
    assert ((draws.std(0) - std).abs() <= 5 * std / (2 * count) ** 0.5 + rounding).all()


@pytest.mark.parametrize(("name", "attribute"), [("tiny", "latents"), ("vq", "latents"), ("dc", "latent")])
def test_autoencoders_without_a_distribution(run, source, models, name, attribute):
    arrays = run(autoencoder=name, flip=True).arrays
    model, pixels = models[1][name], pixels_of(source)[0]["train"]
    scale = model.config.scaling_factor
    assert not arrays.encoded.variational
    with torch.no_grad():
        straight, flipped = (getattr(model.encode(each), attribute) * scale for each in (pixels, pixels.flip(-1)))
    torch.testing.assert_close(torch.from_numpy(arrays.train.batch(range(24))[0]), straight, rtol=1e-4, atol=1e-5)
    drawn, _ = arrays.train.batch(range(24), torch.Generator().manual_seed(1))
    coins = torch.randint(2, (24,), generator=torch.Generator().manual_seed(1)).bool()[:, None, None, None]
    torch.testing.assert_close(torch.from_numpy(drawn), torch.where(coins, flipped, straight), rtol=1e-4, atol=1e-5)


def test_statistics_of_each_channel_normalise(run, source, models, tmp_path):
    means, stds = [0.1, -0.2, 0.3], [2.0, 0.5, 1.5]
    variational(latents_mean=means, latents_std=stds, shift_factor=None).save_pretrained(tmp_path / "own")
    arrays = run(autoencoder=tmp_path / "own").arrays
    raw = torch.from_numpy(arrays.train.batch(range(24))[0])
    mean = posterior(models[1]["kl"], pixels_of(source)[0]["train"]).mean
    # As diffusers' pipelines for SDXL do it.
    exact = (mean - torch.tensor(means).view(1, 3, 1, 1)) * SCALE / torch.tensor(stds).view(1, 3, 1, 1)
    torch.testing.assert_close(raw, exact, rtol=1e-4, atol=1e-5)


def test_the_autoencoder_is_found_again_and_decodes(run, models, tmp_path):
    shutil.copytree(models[0] / "pipeline", tmp_path / "pipeline")
    arrays = run(autoencoder=tmp_path / "pipeline").arrays
    assert arrays.encoded.autoencoder_subfolder == "vae"
    loaded = arrays.autoencoder()
    batch = torch.from_numpy(arrays.train.batch([0, 1])[0])
    with torch.no_grad():
        decoded = loaded.model.decode(batch / SCALE + SHIFT).sample
        again = models[1]["kl"].decode(batch / SCALE + SHIFT).sample
    torch.testing.assert_close(decoded, again)
    assert decoded.shape == (2, 3, SIZE, SIZE)
    changed = variational()
    with torch.no_grad():
        changed.decoder.conv_out.bias[0] += 1
    changed.save_pretrained(tmp_path / "pipeline" / "vae")
    refused("is not the one that made the latents", arrays.autoencoder)
    # Encoding with it is something else, too.
    refused("has changed since the encoding into", run, autoencoder=tmp_path / "pipeline")
    shutil.rmtree(tmp_path / "pipeline")
    refused("cannot load the autoencoder", arrays.autoencoder)


def test_grey_images(run, source, models):
    arrays = run(autoencoder="grey").arrays
    mean = posterior(models[1]["grey"], pixels_of(source, channels=1)[0]["train"]).mean
    torch.testing.assert_close(
        torch.from_numpy(arrays.train.batch(range(24))[0]), (mean - SHIFT) * SCALE, rtol=1e-4, atol=1e-5
    )


def test_shards_that_are_not_what_the_folder_says(run, tmp_path):
    """Its fingerprints may all be right: whoever made it up has made them, too."""
    folder = run().arrays.folder
    kept = content(folder)
    path, meta = folder / "train-00000.safetensors", folder / latents.META

    def forge(tensors=None, **facts):
        for name, each in kept.items():
            (folder / name).write_bytes(each)
        written = json.loads(meta.read_text())
        shard = written["train"]["shards"][0]
        if tensors is not None:
            path.write_bytes(tensors)
            shard |= {"bytes": len(tensors), "sha256": hashlib.sha256(tensors).hexdigest()}
        _, encoded, shards, others = latents.read_meta(folder)
        encoded = dataclasses.replace(encoded, **facts)
        shards["train"] = (latents.Shard(**shard), *shards["train"][1:])
        latents.write_meta(folder, encoded, shards, others)
        return folder

    good = safetensors.numpy.load(kept[path.name])
    other = {**good, "labels": good["labels"][:1]}
    refused("train-00000.safetensors are", latents.prepare, forge(safetensors.numpy.save(other)))
    without = {name: each for name, each in good.items() if name != "logvar"}
    refused("train-00000.safetensors are", latents.prepare, forge(safetensors.numpy.save(without)))
    refused("are {", latents.prepare, forge(latent_shape=(3, 1 << 20, 1 << 20)))
    lying = struct.pack("<Q", 1 << 62) + kept[path.name][8:]
    refused("no whole safetensors file", latents.prepare, forge(lying))
    latents.prepare(forge())


# Going on


def failing(monkeypatch, module, name, at, error):
    """Makes a function fail at its n-th call."""
    original, calls = getattr(module, name), []

    def replaced(*arguments, **more):
        calls.append(1)
        if len(calls) == at:
            raise error
        return original(*arguments, **more)

    monkeypatch.setattr(module, name, replaced)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("module", "name", "at", "error"),
    [
        (latents, "write_shard", 3, FULL),
        (latents, "write_shard", 3, KeyboardInterrupt()),
        # The second shard has been written, and is not known to have been.
        (encode._Job, "_commit", 3, KeyboardInterrupt()),
        # In the middle of a shard, and of a file.
        (encode._Job, "_call", 6, KeyboardInterrupt()),
        (files.os, "fsync", 6, FULL),
        (latents, "write_meta", 1, FULL),
    ],
)
def test_what_was_broken_off_goes_on_to_equal_bytes(run, monkeypatch, tmp_path, module, name, at, error):
    whole = run(out="whole").arrays.folder
    with monkeypatch.context() as patch:
        failing(patch, module, name, at, error)
        with pytest.raises((ConfigError, KeyboardInterrupt)) as caught:
            run()
    if error is FULL:
        assert "No space left on device; what was finished stays, and the same command goes on" in str(caught.value)
    refused("has not finished; the command that began it", latents.prepare, tmp_path / "out")
    # What a killed process leaves of files that it was writing, and one that nobody knows to be whole.
    for stray in (".train-00002.safetensors.123", ".latents-progress.json.123", "validation-00000.safetensors"):
        if name != "write_meta":
            (tmp_path / "out" / stray).write_bytes(b"half")
    watcher = Silent()
    done = run(watcher=watcher)
    assert done.status == "finished"
    assert any(note.startswith("going on after") for note in watcher.notes)
    assert name == "write_meta" or watcher.shown[0] == 32
    assert content(tmp_path / "out") == content(whole)
    assert run().status == "already finished"
    assert content(tmp_path / "out") == content(whole)


def test_what_fails_at_once_leaves_nothing(run, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        failing(patch, latents, "write_shard", 1, FULL)
        refused("No space left on device", run, out="deep/out")
    assert not (tmp_path / "deep").exists()


def test_another_command_on_a_folder_is_refused(run, source, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        failing(patch, latents, "write_shard", 3, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run()
    before = content(tmp_path / "out")
    for finished in (False, True):
        if finished:
            run()
            before = content(tmp_path / "out")
        for more, words in (
            ({"flip": True}, "--flip: False there, True asked for"),
            ({"batch_size": 5}, "--batch-size: 4 there, 5 asked for"),
            ({"image_size": 32}, "--image-size: 16 there, 32 asked for"),
            ({"dtype": "float16"}, "--dtype: 'float32' there"),
            ({"shard_size": 11}, "--shard-size: 10 there"),
            ({"autoencoder": "tiny"}, "--autoencoder: "),
            ({"source": source / "train"}, "--source: "),
        ):
            refused(["is encoded with other arguments", words], run, **more)
        assert content(tmp_path / "out") == before
    # The same images and the same autoencoder may have been moved.
    source.rename(tmp_path / "moved")
    assert run(source=tmp_path / "moved").status == "already finished"
    (tmp_path / "moved" / "train" / "cat" / "00.png").unlink()
    refused("--source: ", run, source=tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", source)
    refused("has changed since the encoding into", run)
    with folders.claimed(tmp_path / "out", "encoding into"):
        refused("another process is encoding into", run, source=tmp_path / "moved")


@pytest.mark.parametrize("damage", ["progress", "shorter", "gone"])
def test_an_unfinished_folder_that_is_damaged(run, monkeypatch, tmp_path, damage):
    with monkeypatch.context() as patch:
        failing(patch, latents, "write_shard", 3, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run()
    path = tmp_path / "out" / ("latents-progress.json" if damage == "progress" else "train-00001.safetensors")
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-10])
    words = {"progress": "is damaged", "shorter": "have been cut short", "gone": "cannot be read: No such file"}
    refused([str(path), words[damage], "encode the images anew"], run)


@pytest.mark.slow
def test_a_kill_at_any_moment_loses_nothing_that_was_finished(run, tmp_path):
    seconds = time.perf_counter()
    whole = run(out="whole", shard_size=3).arrays.folder
    seconds = time.perf_counter() - seconds
    rng = random.Random(0)
    resumed = 0
    for number in range(5):
        folder = tmp_path / f"killed{number}"
        for attempt in range(8):
            there = len(list(folder.glob("train-*")))
            child = os.fork()
            if not child:
                # Nothing of pytest's runs in the child.
                try:
                    run(out=folder.name, shard_size=3)
                finally:
                    os._exit(0)
            # Every other kill falls before or into the first batches; the rest, on a machine of any speed, when a shard
            # more is finished.
            ended = False
            while attempt % 2 and not ended and len(list(folder.glob("train-*"))) <= there:
                ended = os.waitpid(child, os.WNOHANG)[0] != 0
                time.sleep(0.001)
            if not ended:
                time.sleep(rng.uniform(0, 0.2 * seconds))
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            if (folder / "latents.json").exists():
                break
            resumed += any(folder.glob("train-*"))
        run(out=folder.name, shard_size=3)
        assert content(folder) == content(whole)
    assert resumed > 5


# What is refused


def change_meta(folder, change):
    meta = json.loads((folder / "latents.json").read_text())
    change(meta)
    (folder / "latents.json").write_text(json.dumps(meta))


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_folders_that_are_not_what_they_were_are_refused(run, tmp_path):
    made = run().arrays.folder
    for damage, words in [
        (lambda f: (f / "train-00001.safetensors").write_bytes(b"x"), ["train-00001", "cut short: they have 1 bytes"]),
        (lambda f: (f / "train-00001.safetensors").unlink(), ["train-00001", "cannot be read: No such file"]),
        (lambda f: flip_a_bit(f / "train-00001.safetensors"), ["train-00001", "have changed since they were encoded"]),
        (lambda f: change_meta(f, lambda m: m.update(format=2)), "later version of siamesenorm"),
        (lambda f: change_meta(f, lambda m: m.update(scale=[1.0] * 3)), "changed by hand"),
        (lambda f: change_meta(f, lambda m: m.update(scale=[1.0])), "is damaged: ValueError"),
        (lambda f: change_meta(f, lambda m: m.update(dtype="int8")), "is damaged: ValueError"),
        (lambda f: change_meta(f, lambda m: m.update(latent_shape=[3, 8])), "is damaged: ValueError"),
        (lambda f: change_meta(f, lambda m: m["train"]["shards"].pop()), "changed by hand"),
        (lambda f: change_meta(f, lambda m: m["train"]["shards"].clear()), "is damaged: ValueError"),
        (lambda f: change_meta(f, lambda m: m["train"]["shards"][0].update(file="../x")), "no file name"),
        (lambda f: change_meta(f, lambda m: m.pop("classes")), "is damaged: KeyError at 'classes'"),
        (lambda f: (f / "latents.json").write_text("[]"), "is damaged"),
        (lambda f: (f / "latents.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "latents.json").unlink(), "holds no latents"),
        (lambda f: shutil.rmtree(f), "there is no folder"),
    ]:
        folder = tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made, folder)
        latents.prepare(folder)
        damage(folder)
        refused(words, latents.prepare, folder)


def test_shards_are_read_as_a_whole_once(run, monkeypatch):
    made = run().arrays.folder
    read = []
    original = latents._check_content
    monkeypatch.setattr(latents, "_check_content", lambda path, shard: (read.append(path.name), original(path, shard)))
    first = latents.prepare(made)
    assert len(read) == 4
    assert latents.prepare(str(made)).sha256 == first.sha256
    assert len(read) == 4


def test_requests_that_cannot_be_done(run, source, models, tmp_path):
    for more, words in (
        ({"batch_size": 0}, "--batch-size must be at least 1"),
        ({"dtype": "float8"}, ["unknown --dtype 'float8'", "did you mean 'float"]),
        ({"device": "gpu"}, "--device gpu cannot be used"),
        ({"device": "meta:7x"}, "--device meta:7x cannot be used"),
        ({"autoencoder": "nothing"}, "cannot load the autoencoder"),
        ({"image_size": 17}, ["--image-size 17 does not fit", "8 × 8", "multiple of 2"]),
        ({"image_size": 1}, "cannot encode images of 1 × 1"),
        ({"source": tmp_path / "nowhere"}, "there is no file or folder"),
        ({"out": "images/latents"}, "lies in the source"),
    ):
        refused(words, run, **more)
    (tmp_path / "file").write_text("")
    refused("is a file; --out needs a folder", run, out="file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    refused("is not empty and holds no latents", run, out="full")
    for name in ("autoencoder", "unet", "weights"):
        shutil.copytree(models[0] / "kl", tmp_path / name)
    config = json.loads((tmp_path / "unet" / "config.json").read_text())
    for kind in ("UNet2DModel", "Nothing"):
        (tmp_path / "unet" / "config.json").write_text(json.dumps({**config, "_class_name": kind}))
        refused(["is no autoencoder of diffusers", kind], run, autoencoder=tmp_path / "unet")
    from safetensors.torch import load_file, save_file

    path = tmp_path / "weights" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    weights.pop("encoder.conv_in.weight")
    save_file(weights, path)
    refused("lacks weights (1, encoder.conv_in.weight", run, autoencoder=tmp_path / "weights")
    path.write_bytes(path.read_bytes()[:100])
    refused("cannot load the autoencoder", run, autoencoder=tmp_path / "weights")
    four = variational(in_channels=4, out_channels=4)
    four.save_pretrained(tmp_path / "four")
    refused("takes images of 4 channels", run, autoencoder=tmp_path / "four")
    assert not (tmp_path / "out").exists()


def test_latents_that_cannot_be_stored(run, tmp_path):
    model = variational()
    with torch.no_grad():
        model.quant_conv.bias.fill_(1e5)
    model.save_pretrained(tmp_path / "large")
    refused(
        ["too large for float16", "--dtype float32", "00.png"], run, autoencoder=tmp_path / "large", dtype="float16"
    )
    assert np.isfinite(run(autoencoder=tmp_path / "large").arrays.train.batch(range(24))[0]).all()
    with torch.no_grad():
        model.quant_conv.bias.fill_(float("nan"))
    model.save_pretrained(tmp_path / "nan")
    refused(["not finite for", "00.png"], run, out="nan-out", autoencoder=tmp_path / "nan")


def test_too_little_memory_is_said(run, monkeypatch):
    def full(self, batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(autoencoders.Autoencoder, "encode", full)
    refused(["the device cpu has too little memory for 1 images", "smaller --batch-size"], run)


# The command


def command(capsys, *arguments):
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return left.value.code or 0, out, err


def test_the_command(source, models, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (source / "train" / "cat" / "00.png").write_bytes(b"no image")
    arguments = [
        "data", "encode-latents", source, "--autoencoder", models[0] / "kl", "--image-size", "16", "--out", "out",
        "--device", "cpu", "--flip",
    ]  # fmt: skip
    code, out, err = command(capsys, *arguments)
    assert code == 0
    assert "train            23 images, 1 file\n" in out
    assert "unreadable       1, left out" in out
    assert "means and variances of 3 × 8 × 8, float16, and of the flipped images" in out
    assert str(source / "train" / "cat" / "00.png") in err
    assert "encoding 100%  31 images (" in err
    found = latents.prepare("out")
    assert f"sha256           {found.sha256}" in out
    code, out, _ = command(capsys, *arguments)
    assert "has already been encoded with these arguments" in out
    code, out, _ = command(capsys, *arguments, "--json")
    summary = json.loads(out)
    assert (summary["status"], summary["sha256"]) == ("already finished", found.sha256)
    code, out, err = command(capsys, *arguments[:-1])
    assert (code, out) == (2, "")
    assert "--flip: True there, False asked for" in err
    with monkeypatch.context() as patch:
        failing(patch, latents, "write_shard", 1, KeyboardInterrupt())
        code, out, err = command(capsys, *arguments[:7], "--out", "new")
    assert (code, out) == (130, "")
    assert "the same command goes on" in err
    assert Path("new/latents-progress.json").exists()


def test_digits_are_encoded_too(run, models):
    arrays = run(source="digits", autoencoder="grey", image_size=8, shard_size=1000, batch_size=256).arrays
    assert (len(arrays.train) + len(arrays.validation), len(arrays.classes)) == (1797, 10)
    assert arrays.latent_shape == (3, 4, 4)
