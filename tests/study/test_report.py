"""The table in its two files, and the report with its figures."""

import json
import math
import re
from collections import Counter

import numpy as np
import pyarrow.parquet as parquet
import pytest

from siamesenorm.study import results
from siamesenorm.study.figures import draw
from siamesenorm.study.folder import StudyFolder
from siamesenorm.training.evaluate import held_out_sequences
from siamesenorm.training.run_folder import read_metrics


def test_the_report_shows_every_figure_and_table(done):
    folder = done.folder
    text, page = folder.summary.read_text(), folder.report.read_text()
    stems = ("loss-over-lr", "loss-curves", "gradient-norms")
    for stem in stems:
        assert f"(figures/{stem}.png)" in text
        for suffix in ("png", "svg"):
            assert (folder.figures / f"{stem}.{suffix}").stat().st_size > 1000
    assert text.startswith("# Which?\n\nTwo rates.\n\n")
    assert page.count("<figure") == len(stems) == page.count("</svg>")
    for words in (done.comparison.advice, "Two rates.", "The largest of all steps"):
        assert words in text
        assert words in page
    # Divergence is marked in the figure and said in words: 2 of 2 seeds of each scheme at 1e30.
    assert "Diverged: pre, lr 1e+30: 2 of 2; siamese:x=hybrid, lr 1e+30: 2 of 2." in text
    assert (folder.figures / "loss-over-lr.svg").read_text().count(">× 2 of 2<") == 2
    assert "not finite at step" in text
    # The losses of the figure are those of the table.
    for condition in done.comparison.best:
        assert f"| {condition.loss} |" in text
    difference = done.comparison.difference(done.comparison.best[1])
    assert f"| {difference}" in text


def test_the_papers_figures_are_beside_the_studys_and_labelled(done):
    text = done.folder.summary.read_text()
    assert "Perplexity. The paper's figures, and none of this study's" in text
    assert "| large | 10.5 |" in text
    head = next(line for line in text.splitlines() if line.startswith("| scheme | lr | loss"))
    assert head.endswith("| paper: figure |")
    for scheme, figure in (("pre", 11), ("siamese:x=hybrid", 10)):
        row = next(line for line in text.splitlines() if line.startswith(f"| {scheme} | 0.01 "))
        assert row.endswith(f" | {figure} |")
    pre, siamese = (condition.loss.mean for condition in done.comparison.best)
    same = int(siamese < pre)
    assert f"in the same order here, by loss, and in the paper, by figure: {same} of 1." in text


def test_what_was_not_equal_is_said(done):
    text = done.folder.summary.read_text()
    counts = {row["scheme"]: row["params"] for row in done.rows if row["status"] == "finished"}
    share = counts["siamese:x=hybrid"] / counts["pre"] - 1
    assert share > 0.001
    assert f"The model of pre, lr 0.01 has {counts['pre']:,} parameters" in text
    assert f"siamese:x=hybrid, lr 0.01 {share:+.2%}" in text
    assert "Each run that finished saw 448 tokens." in text
    assert re.search(r"The data's SHA-256: [0-9a-f]{64}\. Made with Python", text)


def test_a_prediction_that_ignores_its_input_is_the_measure_of_nothing_learnt(done):
    (held_out,) = done.folder.path.parent.glob("cache/*/validation*")
    sequences = held_out_sequences([np.fromfile(held_out, dtype=np.uint16)], 16, 4)
    # All but the first token of each are predicted.
    tokens = Counter(sequences[:, 1:].flatten().tolist())
    by_hand = -sum(count * math.log(count / 60) for count in tokens.values()) / 60
    assert [row["blind_loss"] for row in done.rows] == pytest.approx([by_hand] * len(done.rows))
    assert f"A prediction that ignores its input would come to {by_hand:.4f}." in done.folder.summary.read_text()


def test_both_tables_hold_the_same(done):
    table = parquet.read_table(done.folder.parquet)
    assert table.schema.metadata[b"format_version"] == b"1"
    rows = table.to_pylist()
    assert [row["run"] for row in rows] == [run.key for run in done.comparison.study.runs]
    lines = done.folder.csv.read_text().splitlines()
    assert lines[0].split(",") == table.column_names
    for row, made in zip(rows, done.rows, strict=True):
        for column, value in made.items():
            kept = row[column]
            assert kept == value or kept == json.dumps(value), column
    types = {column: str(table.schema.field(column).type) for column in table.column_names}
    assert (types["val_loss"], types["seed"], types["config.train.compile"]) == ("double", "int64", "bool")
    assert (types["status"], types["config.model.options.x"]) == ("string", "string")
    # The configuration is complete, and time and memory are told apart.
    assert {"config.optim.lr", "config.data.sha256", "config.schedule.warmup_steps"} <= set(types)
    assert set(results.TIME_AND_MEMORY) - {"images_per_second"} <= {column for column in types if rows[0][column]}


def test_an_empty_study_has_a_table_and_a_report_too(make, tmp_path):
    from siamesenorm.study import report

    study = make()
    with StudyFolder(tmp_path / "out").claim(study):
        pass
    found = report(study, tmp_path / "out")
    assert {row["status"] for row in found.rows} == {"pending"}
    assert "Nothing can be recommended yet" in found.folder.summary.read_text()
    assert "<figure" not in found.folder.report.read_text()


def test_a_report_of_the_first_runs_has_figures_of_those(make, go):
    from siamesenorm.study import report

    first, whole = make("schemes=[pre]", "lrs=[1e-2]"), make("schemes=[pre]", "lrs=[1e-2,2e-2]")
    folder = go(first).folder
    found = report(whole, folder.path)
    assert {row["status"] for row in found.rows} == {"finished", "pending"}
    metrics = {run.key: read_metrics(folder.run(run).metrics) for run in first.runs}
    drawn = draw(found.comparison, metrics)
    assert [each.stem for each in drawn] == ["loss", "loss-curves", "gradient-norms"]
    assert set(drawn[1].data["run"]) == {"pre, lr 0.01"}
