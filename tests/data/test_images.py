"""Labelled images: where they come from, what becomes of them, and what is refused."""

import hashlib
import io
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from siamesenorm.data import images, pixels
from siamesenorm.data.image_sources import _SHOWN
from siamesenorm.residual import ConfigError
from tests.data.watching import Silent


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("SIAMESENORM_CACHE", str(folder))
    return folder


@pytest.fixture
def datasets(cache, monkeypatch):
    module = pytest.importorskip("datasets")
    monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", cache / "datasets")
    module.disable_progress_bars()
    return module


def prepared(source, watcher=None, **more):
    return images.prepare(str(source), **{"image_size": 8, "watcher": watcher or Silent(), **more})


def picture(seed, size=(12, 10), mode="RGB"):
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def encoded(image, format="PNG", **more):
    out = io.BytesIO()
    image.save(out, format, **more)
    return out.getvalue()


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def fill(root: Path, classes, count, seed=0, start=0):
    for at, name in enumerate(classes):
        for number in range(start, start + count):
            write(root / name / f"{number:03d}.png", encoded(picture(1000 * seed + 100 * at + number)))
    return root


def names(split):
    return ["/".join(Path(split.where(index)).parts[-2:]) for index in range(len(split))]


def refused(source, words, **more):
    with pytest.raises(ConfigError) as caught:
        prepared(source, **more)
    for word in [words] if isinstance(words, str) else words:
        assert word in str(caught.value)
    return str(caught.value)


# The embedded digits


def test_digits_are_scikit_learns_by_class_and_split_for_good():
    from sklearn.datasets import load_digits

    found, scans = images.prepare(watcher=Silent()), load_digits()
    assert found.classes == tuple("0123456789")
    assert (found.image_size, found.channels) == (8, 1)
    both = {}
    for name in ("train", "validation"):
        split = getattr(found, name)
        batch, labels = split.batch(range(len(split)))
        assert (batch.shape, batch.dtype, labels.dtype) == ((len(split), 1, 8, 8), np.uint8, np.int64)
        assert (np.diff(labels) >= 0).all()
        assert (labels == split.labels).all()
        both[name] = sorted(zip(labels.tolist(), map(np.ndarray.tobytes, batch), strict=True))
    # 16 is the scans' white, and so 255 is.
    whole = sorted(
        (int(label), np.uint8(np.rint(scan * 15.9375)).tobytes())
        for label, scan in zip(scans.target, scans.images, strict=True)
    )
    assert sorted(both["train"] + both["validation"]) == whole
    assert np.bincount(found.validation.labels).tolist() == [round(0.2 * n) for n in np.bincount(scans.target)]
    # What is in the package depends on nothing here, so the split is this one wherever it runs.
    again = images.prepare(watcher=Silent())
    assert again.sha256 == found.sha256
    assert (again.validation.batch(range(99))[0] == found.validation.batch(range(99))[0]).all()
    other = images.prepare(watcher=Silent(), validation_fraction=0.1)
    assert np.bincount(other.validation.labels).tolist() == [round(0.1 * n) for n in np.bincount(scans.target)]
    assert other.sha256 != found.sha256
    assert set(both["validation"]) >= {
        (int(label), each.tobytes()) for each, label in zip(*other.validation.batch(range(100)), strict=True)
    }


def test_digits_in_another_size_are_interpolated_linearly():
    native = images.prepare(watcher=Silent(), channels=3).train
    grown = images.prepare(watcher=Silent(), image_size=16, channels=3).train
    small, labels = native.batch([3, 700])
    large, same = grown.batch([3, 700])
    assert (labels == same).all()
    assert (large == large[:, :1]).all()
    # Twice the size in each direction: 3/4 of the nearer pixel and 1/4 of the farther one.
    weights = np.zeros((16, 8))
    for row in range(16):
        nearer, farther = row // 2, row // 2 + (1 if row % 2 else -1)
        weights[row, nearer] += 0.75
        weights[row, min(max(farther, 0), 7)] += 0.25
    exact = np.einsum("ih,nchw,jw->ncij", weights, small, weights)
    # Each direction is rounded once.
    assert np.abs(large - exact).max() <= 1.0


# Folders of classes


def test_class_folders_with_splits(tmp_path):
    fill(tmp_path / "set" / "train", ["dog", "cat", "Bird"], 4)
    fill(tmp_path / "set" / "val", ["dog", "cat", "Bird"], 2, seed=1)
    # Deeper folders, other suffixes, and what is no image.
    write(tmp_path / "set" / "train" / "cat" / "more" / "deep.JPEG", encoded(picture(7), "JPEG"))
    write(tmp_path / "set" / "train" / "cat" / "notes.txt", b"no image")
    write(tmp_path / "set" / "train" / "cat" / ".hidden.png", b"no image")
    write(tmp_path / "set" / "train" / "stray.png", encoded(picture(8)))
    write(tmp_path / "set" / "meta" / "x.png", encoded(picture(9)))
    watcher = Silent()
    found = prepared(tmp_path / "set", watcher)
    assert found.classes == ("Bird", "cat", "dog")
    assert found.train.labels.tolist() == [0] * 4 + [1] * 5 + [2] * 4
    assert found.validation.labels.tolist() == [0, 0, 1, 1, 2, 2]
    four = [f"{number:03d}.png" for number in range(4)]
    assert names(found.train) == [f"Bird/{n}" for n in four] + [f"cat/{n}" for n in four] + ["more/deep.JPEG"] + [
        f"dog/{n}" for n in four
    ]
    assert any("'meta'" in note for note in watcher.notes)
    assert any(note.endswith("in no class folder are left out: 1") for note in watcher.notes)
    # A test split is what is validated on where there is no other.
    (tmp_path / "set" / "val").rename(tmp_path / "set" / "Test")
    watcher = Silent()
    moved = prepared(tmp_path / "set", watcher)
    assert moved.sha256 == found.sha256
    assert any("'Test' is taken" in note for note in watcher.notes)
    shutil.copytree(tmp_path / "set" / "Test", tmp_path / "set" / "valid")
    write(tmp_path / "set" / "Test" / "cat" / "more.png", encoded(picture(1)))
    assert prepared(tmp_path / "set").sha256 == found.sha256


def test_a_folder_without_splits_holds_out_a_tenth_of_each_class(tmp_path):
    fill(tmp_path / "a", ["one", "two"], 30)
    write(tmp_path / "a" / "three" / "only.png", encoded(picture(99)))
    write(tmp_path / "a" / "four" / "a.png", encoded(picture(98)))
    write(tmp_path / "a" / "four" / "b.png", encoded(picture(97)))
    found = prepared(tmp_path / "a")
    assert found.classes == ("four", "one", "three", "two")
    assert np.bincount(found.train.labels).tolist() == [1, 27, 1, 27]
    assert np.bincount(found.validation.labels, minlength=4).tolist() == [1, 3, 0, 3]
    assert not set(names(found.train)) & set(names(found.validation))
    # The names decide: wherever the folder lies, whatever is in the files, and whatever else there is.
    held_out = set(names(found.validation))
    for name, count in (("one", 3), ("two", 3), ("four", 1)):
        of_class = [each for each in {*names(found.train), *held_out} if each.startswith(f"{name}/")]
        smallest = sorted(of_class, key=lambda each: hashlib.sha256(each.encode()).digest())[:count]
        assert held_out & set(of_class) == set(smallest)
    (tmp_path / "a").rename(tmp_path / "b")
    fill(tmp_path / "b", ["one", "two"], 30, seed=5)
    fill(tmp_path / "b", ["zebra"], 10)
    moved = prepared(tmp_path / "b")
    assert {name for name in names(moved.validation) if "zebra" not in name} == held_out
    assert moved.sha256 != found.sha256
    half = prepared(tmp_path / "b", validation_fraction=0.5)
    assert np.bincount(half.validation.labels).tolist() == [1, 15, 0, 15, 5]


def test_names_may_be_any_bytes(tmp_path):
    root = os.fsencode(tmp_path)
    for number in range(12):
        folder = root + [b"/caf\xe9", "/\u6f22 [x]\n".encode()][number % 2]
        os.makedirs(folder, exist_ok=True)
        with open(folder + b"/\xff%d.png" % number, "wb") as file:
            file.write(encoded(picture(number)))
    first, again = prepared(tmp_path), prepared(tmp_path)
    assert first.sha256 == again.sha256
    assert first.classes == ("caf\udce9", "\u6f22 [x]\n")
    assert (first.train.batch(range(10))[0] == again.train.batch(range(10))[0]).all()
    assert first.train.where(0).encode("utf-8", "surrogateescape").endswith(b".png")


def test_a_class_may_be_called_train(tmp_path):
    fill(tmp_path, ["car", "train", "test"], 3)
    assert prepared(tmp_path).classes == ("car", "test", "train")


def test_folders_that_are_not_right(tmp_path):
    base = tmp_path / "set"
    fill(base / "train", ["a", "b"], 2)
    (base / "train" / "empty").mkdir()
    refused(base, ["no images", "'empty'", "train"])
    write(base / "train" / "empty" / "readme.md", b"")
    refused(base, ["no images", "'empty'"])
    shutil.rmtree(base / "train" / "empty")
    fill(base / "val", ["b", "c"], 2)
    message = refused(base, "the classes to train and to validate on differ")
    assert f"only in {base / 'train'}: 'a'" in message
    assert f"only in {base / 'val'}: 'c'" in message
    fill(base / "validation", ["a", "b"], 2)
    refused(base, "'val', 'validation' all name the split 'validation'")
    shutil.rmtree(base / "val")
    refused(base, "has a validation split of its own", validation_fraction=0.5)
    # ImageNet's images to validate on come without class folders.
    shutil.rmtree(base / "validation")
    write(base / "val" / "1.png", encoded(picture(1)))
    refused(base, [str(base / "val"), "images without class folders", "name of the folder"])
    shutil.rmtree(base / "train")
    fill(base / "val", ["b"], 2)
    refused(base, ["none is to train on", "'val'"])

    flat = tmp_path / "flat"
    write(flat / "1.png", encoded(picture(1)))
    refused(flat, "images without class folders")
    (tmp_path / "nothing").mkdir()
    refused(tmp_path / "nothing", "no class folders")
    refused(tmp_path / "nowhere", ["there is no file or folder", "'digits'"])
    refused(flat / "1.png", "is a file")
    many = fill(tmp_path / "many", [f"class{number:02d}" for number in range(_SHOWN + 4)], 1)
    refused(many, "each class of")
    for folder in many.iterdir():
        (folder / "000.png").unlink()
    refused(many, ["'class00'", "and 4 more"])
    refused(fill(tmp_path / "cols", ["a"], 2), "are for tables", image_column="image")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"image_size": 0}, "image_size must be at least 1"),
        ({"channels": 2}, "channels must be 1 (grey) or 3"),
        ({"validation_fraction": 1.0}, "validation_fraction must be between 0 and 1"),
        ({"crop_fraction": 0.0}, "crop_fraction must be above 0"),
        ({"unreadable": "skp"}, "did you mean 'skip'?"),
        ({"label_column": "label"}, "'digits' is no table"),
    ],
)
def test_arguments_that_make_no_sense(more, words):
    refused("digits", words, **more)


def test_a_size_is_needed_where_images_have_many(tmp_path):
    refused(fill(tmp_path, ["a"], 2), "image_size says which", image_size=None)


# What becomes of an image


def centre(array, size):
    """The centre of (h, w, …), as torchvision cuts it."""
    top, left = (round((side - size) / 2.0) for side in array.shape[:2])
    return array[top : top + size, left : left + size]


@pytest.mark.parametrize("size", [(40, 24), (24, 41), (7, 5), (8, 8), (1, 1), (3, 40)])
@pytest.mark.parametrize("crop_fraction", [1.0, 0.875])
def test_the_short_side_is_resized_and_the_centre_cut_out(size, crop_fraction):
    image = picture(3, size)
    short = int(8 / crop_fraction)
    width, height = size
    # torchvision's Resize and CenterCrop.
    new = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
    expected = centre(np.asarray(image.resize(new, Image.Resampling.BICUBIC)), 8)
    found = pixels.Form(8, 3, crop_fraction, Image.Resampling.BICUBIC).array(image)
    assert (found.shape, found.dtype) == ((3, 8, 8), np.uint8)
    assert (found.transpose(1, 2, 0) == expected).all()


def test_downsizing_averages_and_does_not_alias():
    board = Image.fromarray((np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8))
    found = pixels.Form(8, 1, 1.0, Image.Resampling.BICUBIC).array(board)
    # Black and white in turn is grey from afar; taking single pixels would give one of the two.
    assert np.abs(found.astype(float) - 127.5).max() <= 2


def test_an_extreme_shape_does_not_grow_without_bounds():
    line = np.zeros((1, 100_000, 3), np.uint8)
    line[:, 49_900:50_100, 0] = 255
    for image in (Image.fromarray(line), Image.fromarray(line.transpose(1, 0, 2))):
        found = pixels.Form(512, 3, 1.0, Image.Resampling.BICUBIC).array(image)
        assert (found[0] == 255).all()
        assert (found[1:] == 0).all()


def flat(mode, colour, size=(4, 4)):
    return Image.new(mode, size, colour)


def palette(transparency=None):
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 10, 200, 30])
    return encoded(image, transparency=transparency) if transparency is not None else encoded(image)


@pytest.mark.parametrize(
    ("content", "colour"),
    [
        (encoded(flat("RGB", (10, 200, 30))), (10, 200, 30)),
        (encoded(flat("L", 77)), (77, 77, 77)),
        (encoded(flat("1", 1)), (255, 255, 255)),
        (palette(), (10, 200, 30)),
        # Transparent parts on white, half-transparent ones half way.
        (palette(transparency=1), (255, 255, 255)),
        (encoded(flat("RGBA", (10, 200, 30, 0))), (255, 255, 255)),
        (encoded(flat("RGBA", (0, 100, 200, 51))), (204, 224, 244)),
        (encoded(flat("RGBA", (10, 200, 30, 255))), (10, 200, 30)),
        (encoded(flat("LA", (0, 51))), (204, 204, 204)),
        # 16 bits: 65535 is white.
        (encoded(Image.fromarray(np.full((4, 4), 65535, np.uint16))), (255, 255, 255)),
        (encoded(Image.fromarray(np.full((4, 4), 128 * 257, np.uint16))), (128, 128, 128)),
        (encoded(flat("CMYK", (0, 0, 0, 255)), "TIFF"), (0, 0, 0)),
        (encoded(flat("I", 257 * 9), "TIFF"), (9, 9, 9)),
        # The first of several frames.
        (encoded(flat("L", 5), "GIF", save_all=True, append_images=[flat("L", 200)]), (5, 5, 5)),
        (encoded(flat("L", 5), "WEBP", lossless=True), (5, 5, 5)),
    ],
)
def test_every_kind_of_image_is_taken(content, colour):
    pixels.check(content)
    image = pixels.decode(content)
    found = pixels.Form(4, 3, 1.0, Image.Resampling.BICUBIC).array(image)
    assert (found == np.array(colour)[:, None, None]).all()
    grey = pixels.Form(4, 1, 1.0, Image.Resampling.BICUBIC).array(image)
    assert np.abs(grey - np.dot(colour, (0.299, 0.587, 0.114))).max() <= 1


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_images_are_turned_upright():
    image = picture(1, (6, 4))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    found = pixels.decode(encoded(image, "PNG", exif=exif))
    assert found.size == (4, 6)
    assert (np.asarray(found) == np.rot90(np.asarray(image), -1)).all()
    # What is written about a picture may be broken where the picture is not.
    broken = encoded(image, "PNG", exif=b"Exif\x00\x00II*\x00\x08\x00\x00\x00\xff\xff")
    assert (np.asarray(pixels.decode(broken)) == np.asarray(image)).all()


def test_floating_point_values_have_no_known_range():
    content = encoded(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF")
    for take in (pixels.check, pixels.decode):
        with pytest.raises(pixels.UnreadableError, match="which of them is white"):
            take(content)


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_what_check_passes_decode_takes(kind, progressive):
    more = {"progressive": True} if kind == "JPEG" and progressive else {}
    whole = encoded(picture(1, (64, 48)), kind, **more)
    rng = np.random.default_rng(0)
    outcomes = []
    for cut in [*rng.integers(0, len(whole), 20), len(whole)]:
        results = []
        for take in (pixels.check, pixels.decode):
            try:
                take(whole[:cut])
                results.append(True)
            except pixels.UnreadableError:
                results.append(False)
        outcomes.append(tuple(results))
    assert outcomes[-1] == (True, True)
    assert {check for check, _ in outcomes[:-1]} >= {False}
    assert all(check == decode for check, decode in outcomes)


# Batches


def test_batches_are_the_images_one_by_one(tmp_path, monkeypatch):
    found = prepared(fill(tmp_path, ["a", "b"], 10)).train
    count = len(found)
    each = np.stack([found.batch([index])[0][0] for index in range(count)])
    decoded = [np.asarray(Image.open(found.where(index))) for index in range(count)]
    for index in range(count):
        assert found.image(index).mode == "RGB"
        assert (np.asarray(found.image(index)) == decoded[index]).all()
    lazy = prepared(tmp_path).train
    monkeypatch.setattr(images, "_KEPT_BYTES", 0)
    unkept = prepared(tmp_path).train

    @given(st.lists(st.integers(-count, count - 1), max_size=12))
    @settings(max_examples=30, deadline=None)
    def check(indices):
        for split in (found, lazy, unkept, pickle.loads(pickle.dumps(lazy))):
            batch, labels = split.batch(indices)
            assert batch.shape == (len(indices), 3, 8, 8)
            assert (batch == each[indices]).all()
            assert (labels == found.labels[indices]).all()

    check()
    for split in (lazy, unkept):
        with pytest.raises(IndexError):
            split.batch([count])
        # A batch is the caller's own.
        split.batch([0])[0][:] = 0
        assert (split.batch([0])[0][0] == each[0]).all()
    assert len(pickle.dumps(lazy)) < each.nbytes


def test_grey_and_colour(tmp_path):
    write(tmp_path / "a" / "1.png", encoded(flat("RGB", (200, 100, 0))))
    write(tmp_path / "a" / "2.png", encoded(flat("RGB", (200, 100, 0))))
    grey = prepared(tmp_path, channels=1)
    assert grey.channels == 1
    assert grey.train.image(0).mode == "L"
    assert np.unique(grey.train.batch([0])[0]).tolist() == [round(0.299 * 200 + 0.587 * 100)]


# What cannot be read


def damaged(tmp_path):
    """Ten whole images of two classes each, one cut short, one that is none, and a link to nothing."""
    root = fill(tmp_path / "set", ["a", "b"], 10)
    whole = encoded(picture(50, (64, 64)), "JPEG")
    write(root / "a" / "cut.jpg", whole[: len(whole) // 2])
    write(root / "b" / "text.png", b"no image at all")
    (root / "b" / "link.png").symlink_to(root / "nowhere.png")
    return root


def test_unreadable_images_are_named_counted_and_left_out(tmp_path):
    root = damaged(tmp_path)
    watcher = Silent()
    found = prepared(root, watcher)
    assert len(found.train) + len(found.validation) == 20
    assert len(found.unreadable) == 3
    for name, words in (("a/cut.jpg", "truncated"), ("b/text.png", "no image that"), ("b/link.png", "No such file")):
        (message,) = (message for message in found.unreadable if message.startswith(str(root / name)))
        assert words in message
        assert f"left out: {message}" in watcher.notes
    assert "unreadable and left out: 3 of 23 images" in watcher.notes
    message = refused(root, "unreadable=skip leaves out", unreadable="error")
    assert "a/cut.jpg: " in message
    # Nothing of them is left in what training sees.
    clean = fill(tmp_path / "clean", ["a", "b"], 10)
    assert prepared(clean).sha256 == found.sha256
    # What has become readable is taken; whatever was only out of reach is tried again.
    write(root / "nowhere.png", encoded(picture(5)))
    assert len(prepared(root).unreadable) == 2
    for path in (root / "a").glob("*.png"):
        path.write_bytes(b"")
    message = refused(root, ["no image of the class 'a'", "can be read"])
    assert "a/000.png" in message


def test_images_are_looked_through_once(tmp_path, cache, monkeypatch):
    root = damaged(tmp_path)
    checked = []
    original = pixels.check
    monkeypatch.setattr(pixels, "check", lambda content: (checked.append(len(content)), original(content)))
    monkeypatch.setattr(images, "_QUIET_SECONDS", -1.0)
    monkeypatch.setattr(images, "_SCANNED_AT_ONCE", 8)
    watcher = Silent()
    first = prepared(root, watcher)
    assert len(checked) == 22
    assert watcher.passes == [("looking through the images", 23)]
    assert watcher.shown == (23, 15)
    checked.clear()
    again = prepared(root)
    assert (again.sha256, again.unreadable, checked) == (first.sha256, first.unreadable, [])
    # What was changed is read again, and nothing else.
    new = write(root / "b" / "003.png", encoded(picture(777)))
    changed = prepared(root)
    assert checked == [len(new.read_bytes())]
    assert changed.sha256 != first.sha256
    # Less is remembered where a process was killed while it wrote.
    (memory,) = (cache / "images").iterdir()
    lines = memory.read_bytes()
    # One for each image that is there: what was replaced is gone.
    assert len(list(filter(None, lines.split(b"\n")))) == 22
    memory.write_bytes(lines[: len(lines) // 2 - 20])
    checked.clear()
    assert prepared(root).sha256 == changed.sha256
    assert 8 < len(checked) < 16
    checked.clear()
    assert prepared(root).sha256 == changed.sha256
    assert checked == []
    memory.write_text('{"not": "ours"}\n[1, 2]\n["a/000.png", "1-1", 5, null]\n')
    assert prepared(root).sha256 == changed.sha256


def test_a_broken_off_scan_goes_on(tmp_path, monkeypatch):
    root = fill(tmp_path, ["a", "b"], 10)
    checked = []
    original = pixels.check

    def interrupted(content):
        checked.append(1)
        if len(checked) == 12:
            raise KeyboardInterrupt
        original(content)

    monkeypatch.setattr(images, "_SCANNED_AT_ONCE", 4)
    monkeypatch.setattr(images, "_cores", lambda: 1)
    with monkeypatch.context() as patch:
        patch.setattr(pixels, "check", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepared(root)
    checked.clear()
    monkeypatch.setattr(pixels, "check", lambda content: (checked.append(1), original(content)))
    prepared(root)
    assert len(checked) == 12


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path):
    root = fill(tmp_path / "set", ["a"], 4)
    (tmp_path / "file").write_text("")
    found = prepared(root, cache=tmp_path / "file")
    assert found.sha256 == prepared(root).sha256


def test_an_image_that_goes_away_later_is_named(tmp_path):
    found = prepared(fill(tmp_path, ["a"], 4)).train
    Path(found.where(1)).write_bytes(b"")
    with pytest.raises(ConfigError, match="could be read when the run began") as caught:
        found.batch([0, 1])
    assert found.where(1) in str(caught.value)
    Path(found.where(1)).unlink()
    with pytest.raises(ConfigError, match="No such file"):
        found.image(1)


# Tables


CONTENT = [encoded(picture(number)) for number in range(24)]
LABELS = [number % 3 for number in range(24)]
NAMES = ["ant", "bee", "cow"]


def parquet(path, labels, content=CONTENT, image="image", label="label", **more):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [each if isinstance(each, dict) else {"bytes": each, "path": None} for each in content][: len(labels)]
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({image: pa.array(rows, kind), label: labels, **more}), path, row_group_size=5)
    return path


def contents_by_label(split):
    """Each label's images, by the arrays that they have become."""
    batch, labels = split.batch(range(len(split)))
    return sorted(zip(labels.tolist(), map(np.ndarray.tobytes, batch), strict=True))


def expected(labels, content=CONTENT):
    form = pixels.Form(8, 3, 1.0, Image.Resampling.BICUBIC)
    arrays = [form.array(Image.open(io.BytesIO(each))) for each in content]
    return sorted((label, array.tobytes()) for label, array in zip(labels, arrays, strict=False))


def test_parquet_files_with_names_of_classes(tmp_path, datasets):
    named = [NAMES[label] for label in LABELS]
    one = prepared(parquet(tmp_path / "one.parquet", named))
    assert one.classes == ("ant", "bee", "cow")
    assert sorted(contents_by_label(one.train) + contents_by_label(one.validation)) == expected(LABELS)
    assert np.bincount(one.validation.labels).tolist() == [1, 1, 1]
    # Rows of one class keep their order; the content decides what is held out, not where it stands.
    assert (np.diff(one.train.labels) >= 0).all()
    back = parquet(tmp_path / "back.parquet", named[::-1], content=CONTENT[::-1])
    assert contents_by_label(prepared(back).validation) == contents_by_label(one.validation)

    parquet(tmp_path / "two" / "data" / "train-00000-of-00002.parquet", named[:12], CONTENT[:12])
    parquet(tmp_path / "two" / "data" / "train-00001-of-00002.parquet", named[12:18], CONTENT[12:18])
    parquet(tmp_path / "two" / "data" / "validation-00000-of-00001.parquet", named[18:], CONTENT[18:])
    parquet(tmp_path / "two" / "data" / "test-00000-of-00001.parquet", ["dog"], CONTENT[:1])
    watcher = Silent()
    two = prepared(tmp_path / "two", watcher)
    assert contents_by_label(two.train) == expected(LABELS[:18])
    assert contents_by_label(two.validation) == expected(LABELS[18:], CONTENT[18:])
    assert two.train.where(0).endswith("row 1")
    assert any("'test' are left out" in note for note in watcher.notes)
    assert prepared(tmp_path / "two").sha256 == two.sha256
    parquet(tmp_path / "two" / "data" / "more.parquet", named)
    refused(tmp_path / "two", ["are named after splits", "more.parquet"])


def test_numbers_and_class_labels_of_parquet_files(tmp_path, datasets):
    found = prepared(parquet(tmp_path / "numbers.parquet", LABELS))
    assert found.classes == ("0", "1", "2")
    assert sorted(contents_by_label(found.train) + contents_by_label(found.validation)) == expected(LABELS)
    features = datasets.Features({"img": datasets.Image(), "kind": datasets.ClassLabel(names=["z", "y", "x"])})
    table = datasets.Dataset.from_dict(
        {"img": [{"bytes": each, "path": None} for each in CONTENT], "kind": LABELS}, features
    )
    table.to_parquet(tmp_path / "features.parquet")
    declared = prepared(tmp_path / "features.parquet")
    # Declared names keep their numbers.
    assert declared.classes == ("z", "y", "x")
    assert contents_by_label(declared.validation) == contents_by_label(found.validation)
    # An image that cannot be read is a row's.
    content = [*CONTENT[:5], CONTENT[5][:40], {"bytes": None, "path": None}, *CONTENT[7:]]
    broken = prepared(parquet(tmp_path / "broken.parquet", LABELS, content))
    assert [message.split(": ")[0].split(", ")[-1] for message in broken.unreadable] == ["row 7", "row 6"]
    assert "the row holds no image" in broken.unreadable[0]


def test_a_parquet_file_that_changed_is_read_anew(tmp_path, datasets):
    path = parquet(tmp_path / "a.parquet", LABELS)
    first = prepared(path)
    parquet(path, LABELS, CONTENT[::-1])
    second = prepared(path)
    assert second.sha256 != first.sha256
    assert sorted(contents_by_label(second.train) + contents_by_label(second.validation)) == expected(
        LABELS, CONTENT[::-1]
    )
    pickled = pickle.loads(pickle.dumps(second.train))
    assert (pickled.batch([3, 5])[0] == second.train.batch([3, 5])[0]).all()


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([0, 1, None, 1], ["1 labels are missing", "row 3"]),
        (["a", "", "b", "b"], ["labels are missing", "row 2"]),
        ([0, 1, -1, 1], ["1 labels are out of range", "row 3", "is -1"]),
        ([1, 2, 1, 2], ["no image has the label '0'", "numbers count from 0"]),
        ([0, 0, 10**12, 0], ["no image has the label '1'"]),
        ([0.5, 1.0, 1.0, 0.5], "holds double"),
    ],
)
def test_labels_that_make_no_sense(tmp_path, datasets, labels, words):
    refused(parquet(tmp_path / "a.parquet", labels), words)


def test_columns_are_found_or_named(tmp_path, datasets):
    more = {"other": LABELS, "text": [str(label) for label in LABELS]}
    path = parquet(tmp_path / "a.parquet", LABELS, label="fine", **more)
    refused(path, ["no column is known to hold the labels", "fine (int64)", "other (int64)", "text (string)"])
    refused(path, ["no column 'fin'", "did you mean 'fine'?"], label_column="fin")
    assert prepared(path, label_column="text").classes == ("0", "1", "2")
    refused(path, ["'other'", "does not hold images", "int64"], label_column="fine", image_column="other")
    two = parquet(
        tmp_path / "two.parquet", LABELS, mask=[{"bytes": each, "path": None} for each in CONTENT]
    )  # both of them look like images
    refused(two, ["2 columns could hold the images", "image", "mask"])
    assert contents_by_label(prepared(two, image_column="mask").train)
    write(tmp_path / "mixed" / "a" / "1.png", CONTENT[0])
    parquet(tmp_path / "mixed" / "a.parquet", LABELS)
    refused(tmp_path / "mixed", "1 images and 1 Parquet files")
    write(tmp_path / "broken.parquet", b"PAR1 and nothing else")
    refused(tmp_path / "broken.parquet", "cannot read the Parquet files")


def test_validation_with_other_labels(tmp_path, datasets):
    parquet(tmp_path / "a" / "train.parquet", ["ant", "bee", "bee", "cow"])
    parquet(tmp_path / "a" / "val.parquet", ["ant", "bee", "dog"])
    message = refused(tmp_path / "a", "classes to train and to validate on differ")
    assert "split train: 'cow'" in message
    assert "split validation: 'dog'" in message


def saved(datasets, labels, names=("x", "y", "z"), content=CONTENT):
    features = datasets.Features({"picture": datasets.Image(), "label": datasets.ClassLabel(names=list(names))})
    rows = [{"bytes": each, "path": None} for each in content][: len(labels)]
    return datasets.Dataset.from_dict({"picture": rows, "label": labels}, features)


def test_a_saved_dataset(tmp_path, datasets):
    saved(datasets, LABELS).save_to_disk(tmp_path / "one")
    found = prepared(tmp_path / "one")
    assert found.classes == ("x", "y", "z")
    assert sorted(contents_by_label(found.train) + contents_by_label(found.validation)) == expected(LABELS)
    splits = {"train": saved(datasets, LABELS), "test": saved(datasets, [1, 0])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "two")
    found = prepared(tmp_path / "two")
    assert contents_by_label(found.train) == expected(LABELS)
    # The class that the smaller split lacks is declared all the same.
    assert contents_by_label(found.validation) == expected([1, 0])
    # The same names in another order are the same classes.
    splits["test"] = saved(datasets, [1, 0], names=("y", "x", "z"))
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "three")
    assert contents_by_label(prepared(tmp_path / "three").validation) == expected([0, 1])
    splits["test"] = saved(datasets, [1, 0], names=("x", "y", "w"))
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "four")
    refused(tmp_path / "four", ["only in", "'z'", "'w'"])
    saved(datasets, [0, 1, 0]).save_to_disk(tmp_path / "five")
    refused(tmp_path / "five", "no image has the label 'z'")
    splits = {"train": saved(datasets, LABELS), "test": saved(datasets, [-1, -1])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "six")
    refused(tmp_path / "six", ["2 labels are out of range", "split test", "-1 stands for no label"])
    datasets.DatasetDict({"fold1": saved(datasets, [0]), "fold2": saved(datasets, [0])}).save_to_disk(tmp_path / "7")
    refused(tmp_path / "7", ["'fold1', 'fold2'", "expected: train"])
    (tmp_path / "one" / "state.json").write_text("{")
    refused(tmp_path / "one", "cannot load the dataset saved in")


def test_what_load_dataset_loads(tmp_path, datasets):
    root = tmp_path / "folder"
    fill(root / "train", ["cat", "dog"], 5)
    fill(root / "test", ["cat", "dog"], 2, seed=1)
    found = prepared(f"hf:{root}")
    assert found.classes == ("cat", "dog")
    ours = prepared(root)
    for side in ("train", "validation"):
        assert contents_by_label(getattr(found, side)) == contents_by_label(getattr(ours, side))
    # The images are files there too, and named in messages.
    assert found.train.where(0) == str(root / "train" / "cat" / "000.png")
    write(root / "train" / "cat" / "000.png", b"none")
    assert [message.split(": ")[0] for message in prepared(f"hf:{root}").unreadable] == [
        str(root / "train" / "cat" / "000.png")
    ]
    parquet(tmp_path / "table" / "train.parquet", LABELS)
    found = prepared(f"hf:{tmp_path / 'table'}:default")
    assert sorted(contents_by_label(found.train) + contents_by_label(found.validation)) == expected(LABELS)
    refused(f"hf:{tmp_path / 'table'}:other", ["cannot load the dataset", "other"])
    refused("hf:", "names no dataset")
