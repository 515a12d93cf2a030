"""The studies that this project publishes: complete, readable, and quoted as they are."""

import csv
import re
from pathlib import Path

import pytest

from siamesenorm.study.folder import StudyFolder
from siamesenorm.study.results import FORMAT_VERSION

RESULTS = Path(__file__).parents[2] / "docs" / "results"
STUDIES = ("ablation", "depth", "lr", "warmup")


@pytest.mark.parametrize("name", STUDIES)
def test_a_row_stands_for_each_run_of_the_grid(name):
    folder = StudyFolder(RESULTS / name)
    with folder.csv.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    study = folder.recorded()
    assert study.name == name
    for row, run in zip(rows, study.runs, strict=True):
        assert {column: row[column] for column in run.values} == {key: str(value) for key, value in run.values.items()}
    assert {row["format_version"] for row in rows} == {str(FORMAT_VERSION)}
    assert {row["status"] for row in rows} <= {"finished", "diverged"}
    assert folder.report.is_file()
    assert folder.summary.is_file()


def test_what_is_quoted_is_what_the_studies_say():
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    said = "".join(path.read_text(encoding="utf-8") for path in RESULTS.glob("*/**/*.md"))
    quoted = re.findall(r"-?\d\.\d{4} ± \d\.\d{4}(?: \*)?", page)
    assert len(quoted) > 50
    assert [each for each in quoted if f"| {each} |" not in said] == []
    for link in re.findall(r"\]\(([^)#]+)\)", page):
        assert (RESULTS / link).exists(), link
