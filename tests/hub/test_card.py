"""Model cards: what is found in a saved model, and what is put into one that is there."""

from __future__ import annotations

import pytest
from huggingface_hub import ModelCard
from transformers import LlamaConfig, LlamaForCausalLM

import siamesenorm
from siamesenorm.hub import card
from siamesenorm.residual import ConfigError

TINY = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)


@pytest.fixture
def folder(tmp_path):
    siamesenorm.rewire(LlamaForCausalLM(TINY), "mixln", share=0.5).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_card_says_what_the_configuration_says(folder):
    card.write(folder, "A model", "About it.", {"Notes": "Some."}, base_model="someone/model")
    found = ModelCard.load(folder / "README.md")
    assert (found.data.base_model, found.data.pipeline_tag) == ("someone/model", "text-generation")
    assert found.data.tags == ["siamesenorm", "residual-scheme:mixln"]
    headings = [line for line in found.text.splitlines() if line.startswith("#") and "tells" not in line]
    assert headings == ["# A model", "## How to load it", "## Residual scheme", "## Notes", "## Citation"]
    assert "| `share` | `0.5` |" in found.text
    assert "Mix-LN, [arXiv 2412.13795](https://arxiv.org/abs/2412.13795)" in found.text
    assert 'path = "saved"' in found.text


def test_a_model_that_nobody_rewired_needs_no_package_to_load(tmp_path):
    LlamaForCausalLM(TINY).save_pretrained(tmp_path)
    card.write(tmp_path, "Plain", "", {})
    text = (tmp_path / "README.md").read_text()
    assert "import siamesenorm" not in text
    assert "Residual scheme" not in text
    assert "from transformers import AutoModelForCausalLM, AutoTokenizer" in text


def test_results_come_into_a_card_that_someone_else_wrote(folder):
    (folder / "README.md").write_text(
        "---\nlicense: mit\n---\n\n# Mine\n\n## Evaluation\n\nOld.\n\n## After\n\nKept.\n"
    )
    results = [card.result("task", "text-generation", "data", "acc", 0.5)]
    card.add_results(folder, "New, with a | and more.", results)
    card.add_results(folder, "Newer.", results)
    found = ModelCard.load(folder / "README.md")
    assert found.data.license == "mit"
    assert found.text == "\n# Mine\n\n## Evaluation\n\nNewer.\n\n## After\n\nKept.\n"
    assert [each.metric_value for each in found.data.eval_results] == [0.5]
    (folder / "README.md").write_text("---\nlicense: mit\n---\n\n## Evaluation\n\nOld.\n\n# Limits\n\nKept.\n")
    card.add_results(folder, "New.", results)
    assert ModelCard.load(folder / "README.md").text == "\n## Evaluation\n\nNew.\n\n# Limits\n\nKept.\n"
    (folder / "README.md").write_text("No front matter.\n")
    card.add_results(folder, "New.", results)
    assert ModelCard.load(folder / "README.md").text.endswith("No front matter.\n\n## Evaluation\n\nNew.\n")


def test_where_there_is_no_model_there_is_no_card(tmp_path):
    with pytest.raises(ConfigError, match="holds no saved model"):
        card.write(tmp_path, "Nothing", "", {})
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="is no configuration"):
        card.write(tmp_path, "Nothing", "", {})


def test_a_table_keeps_its_cells_apart():
    assert card.table([("a|b", "c\nd")], ("x", "y")) == "| x | y |\n| --- | --- |\n| a\\|b | c d |"
