"""What the documents say of the code is so."""

import re
from pathlib import Path

import pytest

import siamesenorm

ROOT = Path(__file__).parents[1]
PAGES = re.split(r"^### ", (ROOT / "docs" / "schemes.md").read_text(), flags=re.M)[1:]


def test_every_scheme_has_a_page():
    assert sorted(page.split("\n", 1)[0] for page in PAGES) == list(siamesenorm.schemes())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.split("\n", 1)[0])
def test_the_code_beside_an_equation_is_in_the_schemes_file(page):
    name = re.search(r"`(residual/\w+\.py)`", page)[1]
    lines = {line.strip() for line in (ROOT / "src" / "siamesenorm" / name).read_text().splitlines()}
    quoted = re.findall(r"\| `([^`]+)` \|$", page, flags=re.M)
    assert quoted
    assert [code for code in quoted if code not in lines] == []
