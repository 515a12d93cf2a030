"""What the documents say of the code is so."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import siamesenorm
from siamesenorm.residual import make_scheme

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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.split("\n", 1)[0])
def test_what_a_scheme_cites_is_on_its_page(page):
    paper = make_scheme(page.split("\n", 1)[0]).paper
    assert re.sub(r"\s+", " ", paper) in re.sub(r"\s+", " ", page)
    assert bool(paper) is ("arXiv" in page.split("|", 1)[0])


PACKAGES = ["convert", "hosts", "hub", "ops", "probes", "residual", "study"]


@pytest.mark.parametrize("package", ["siamesenorm", *(f"siamesenorm.{name}" for name in PACKAGES)])
def test_every_public_name_is_in_the_api_reference(package):
    reference = "\n".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    whole = re.search(rf"automodule:: {re.escape(package)}\n *:members:\s*$", reference, flags=re.M)
    module = importlib.import_module(package)
    names = [name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)]
    # Under its own name, or the shorter one that the package itself gives it.
    missing = [name for name in names if not re.search(rf":: siamesenorm(\.\w+)?\.{name}$", reference, flags=re.M)]
    assert whole or missing == []


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("sphinx") is None and "CI" not in os.environ, reason="the extra docs is not installed"
)
def test_the_site_builds_without_a_warning_such_as_a_broken_link(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", ROOT / "docs", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    assert done.returncode == 0, done.stderr
    assert "siamesenorm.rewire" in (tmp_path / "api" / "package.html").read_text()
