"""Each file in examples/ runs as it says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_a_scheme_of_your_own_is_short():
    (text,) = (path.read_text() for path in EXAMPLES if path.stem == "add_your_own_scheme")
    scheme = text[text.index("class ReZeroSublayer") : text.index("def main")]
    assert len(scheme.strip().splitlines()) < 40
