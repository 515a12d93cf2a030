"""What a probe leaves in a folder, and that its words are about its numbers."""

from __future__ import annotations

import copy
import json
import math
import shutil

import pandas
import pytest

from siamesenorm.probes import showing
from siamesenorm.probes.pictures import pictures
from siamesenorm.probes.showing import check_folder, write
from siamesenorm.residual import ConfigError
from tests.probes.results import result
from tests.report.test_page import Tree

STEMS = [
    "stream_rms", "branch_rms", "ratio", "cosine", "share", "stream_grad", "parameter_grad", "deepest_removed",
    "block_removed", "skips", "angles", "lens", "rank", "stability",
]  # fmt: skip


@pytest.fixture(scope="module")
def results():
    return [result("pre", "pre"), result("siamese (a)", "siamese"), result("attnres", "attnres", blocks=3)]


@pytest.fixture(scope="module")
def written(results, tmp_path_factory):
    """A folder with everything in it, and what ``probe.json`` holds."""
    folder = tmp_path_factory.mktemp("probe") / "out"
    return folder, write(results, folder)


def test_a_model_that_overflows_is_shown_too(tmp_path):
    broken = result("broken", "siamese", broken=1)
    assert all(math.isnan(row["effective_rank"]) for row in broken["depth"][2:])
    assert math.isfinite(broken["depth"][1]["effective_rank"])
    write([broken, result("pre", "pre")], tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "The loss of <code>broken</code> is not finite at every depth." in page
    assert page.count("<figure") == len(STEMS)


def of_sites(result):
    """The same without anything else, which is sooner drawn."""
    return {**result, "depth": [], "blocks": [], "skips": [], "angles": [], "stability": None, "trace": {}}


def test_everything_is_there(results, written):
    folder, summary = written
    assert sorted(path.name for path in folder.iterdir()) == sorted([*summary["files"], "probe.json"])
    for stem in STEMS:
        assert (folder / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
        assert (folder / f"{stem}.svg").read_text().startswith("<?xml")
    read = json.loads((folder / "probe.json").read_text())
    assert [model["label"] for model in read["models"]] == ["pre", "siamese (a)", "attnres"]
    assert read["models"][1]["sites"][0]["stream"] == "X"
    assert "trace" not in read["models"][0]
    sites = pandas.read_parquet(folder / "sites.parquet")
    assert sites.groupby("model").size().to_dict() == {"pre": 8, "siamese (a)": 16, "attnres": 6 * 7 // 2}
    depth = pandas.read_parquet(folder / "depth.parquet")
    assert depth[depth["model"] == "pre"]["loss"].tolist() == [row["loss"] for row in results[0]["depth"]]
    assert len(pandas.read_parquet(folder / "trace.parquet")) == 3 * 120
    tree = Tree((folder / "report.html").read_text())
    assert len(tree.all("figure")) == len(STEMS)
    assert tree.text["h1"] == ["A look inside 3 models"]
    assert tree.text["h2"] == [
        "Contents", "The models", "Streams and branches", "Depth", "Stability", "Overflow", "Definitions",
    ]  # fmt: skip


def test_words_are_about_the_numbers(results):
    found = {picture.stem: picture for picture in pictures(results)}
    assert list(found) == STEMS
    pre, siamese, _ = results
    first, last = (siamese["sites"][place]["rms"] for place in (0, -2))
    assert (
        f"`siamese (a), X` goes from {first:.3g} at sublayer 0 to {last:.3g} at sublayer 7" in found["stream_rms"].words
    )
    one = {row["removed"]: row["loss_increase"] for row in siamese["depth"]}[1]
    assert f"{one:+.3g} in `siamese (a)`".replace("-", "−") in found["deepest_removed"].words
    most = max(pre["blocks"], key=lambda row: row["loss_increase"])
    assert f"`pre` loses most without block {most['block']}" in found["block_removed"].words
    assert "1 of 70 steps" in found["stability"].words
    # Six sublayers of attention residuals have up to six streams: one line of them all.
    assert "`attnres, mean of 6 streams`" in found["stream_rms"].words
    assert set(found["deepest_removed"].data["line"]) == {"pre", "siamese (a)", "attnres"}
    for picture in found.values():
        assert len({len(column) for column in picture.data.values()}) == 1


@pytest.mark.slow
def test_a_second_probe_takes_the_place_of_the_first(results, written, tmp_path):
    shutil.copytree(written[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "notes.txt").write_text("mine")
    write([of_sites(results[0])], tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"notes.txt", "sites.parquet"} <= names
    assert not names & {"depth.parquet", "lens.png", "trace.parquet", "stability.svg"}
    # Of a single stream, all comes from it.
    assert "share.png" not in names
    assert Tree((tmp_path / "report.html").read_text()).text["h1"] == ["A look inside pre"]


def test_numbers_that_are_not_finite_and_names_that_are_markup(results, tmp_path):
    broken = {**copy.deepcopy(results[0]), "label": "<b>&`", "skips": [], "angles": [], "blocks": []}
    broken["sites"][3]["rms"] = math.inf
    broken["sites"][4]["rms"] = math.nan
    broken["overflow"] = {"first": "sublayer 3 (block 1, mlp)"}
    broken["trace"]["loss"][110] = None
    write([broken, {**of_sites(results[1]), "sites": [], "counted": 99}], tmp_path)
    assert json.loads((tmp_path / "probe.json").read_text())["models"][0]["sites"][3]["rms"] is None
    page = (tmp_path / "report.html").read_text()
    assert "first stop being finite in sublayer 3 (block 1, mlp)" in page
    assert "2 values of it are not finite" in page
    assert "<b>" not in page
    assert "not measured on the same data" in page


def test_models_on_the_same_data(written):
    assert "not measured on the same data" not in (written[0] / "report.html").read_text()


def test_a_full_disk_leaves_a_folder_that_can_be_used_again(results, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(showing, "save_figure", full)
        with pytest.raises(OSError, match="No space left"):
            write([of_sites(results[0])], tmp_path / "out")
    assert json.loads((tmp_path / "out" / "probe.json").read_text())["models"] == []
    check_folder(tmp_path / "out")


def test_folders_that_are_for_something_else(tmp_path):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ConfigError, match="is a file"):
        check_folder(tmp_path / "file")
    with pytest.raises(ConfigError, match="not empty and holds no results"):
        check_folder(tmp_path)
    check_folder(tmp_path / "new")
