"""Each file in examples/ runs as it says."""

import importlib.util
from pathlib import Path

import pytest

from tests import warm

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
NEEDS = {"lm_eval_task": "lm_eval"}
QUICK = ("add_your_own_scheme", "peft_lora", "transformers_trainer")
MARKED = [pytest.param(path, marks=() if path.stem in QUICK else pytest.mark.slow, id=path.stem) for path in EXAMPLES]


@pytest.mark.parametrize("example", MARKED)
def test_an_example_runs(example, tmp_path):
    library = NEEDS.get(example.stem)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    done = warm.forked(lambda: warm.python([str(example)]), tmp_path)
    assert done.code == 0, done.err
    assert done.out


def test_a_scheme_of_your_own_is_short():
    (text,) = (path.read_text() for path in EXAMPLES if path.stem == "add_your_own_scheme")
    scheme = text[text.index("class ReZeroSublayer") : text.index("def main")]
    assert len(scheme.strip().splitlines()) < 40
