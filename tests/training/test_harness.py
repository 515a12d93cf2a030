"""Tasks of lm-eval on a saved model, against what the model says of each answer, added up by hand."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from siamesenorm.data import byte_tokenizer
from siamesenorm.hosts import build
from siamesenorm.residual import ConfigError
from siamesenorm.training import harness

needs_harness = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
QUESTIONS = [
    {"question": "def", "choices": [" f(x):", " zz"], "answer": 0},
    {"question": "import", "choices": [" q", " sys", " ??"], "answer": 1},
    {"question": "for i in", "choices": [" range", " #"], "answer": 0},
    {"question": "class A", "choices": [":", "(B):"], "answer": 0},
    {"question": "x = [1,", "choices": [" 2]", " return"], "answer": 1},
]


@pytest.fixture
def model():
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {**shape, "vocab_size": byte_tokenizer.VOCAB_SIZE, "max_position_embeddings": 64}
    made = build("llama", config, "siamese", {"x": "hybrid"})
    with torch.no_grad():
        # Answers that differ by more than rounding.
        made.lm_head.weight.normal_(std=1.0)
    return made


def task(folder, name="quiz", **changes):
    """A task file, and its data beside it."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    made = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "target_delimiter": "",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        "metadata": {"version": 2.0},
        **changes,
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(made))
    return str(file)


@torch.no_grad()
def told(model, question, answer):
    """The log-probability of an answer behind a question, in nats."""
    ids = torch.tensor([list((question + answer).encode())])
    chances = model(input_ids=ids).logits.double().log_softmax(-1)[0]
    return sum(float(chances[place - 1, ids[0, place]]) for place in range(len(question), ids.shape[1]))


@needs_harness
def test_figures_of_numpy_are_numbers_in_the_card(model, tmp_path):
    """What lm-eval says of exact matches is numpy's, which YAML would write as an object of Python."""
    changes = {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "doc_to_choice": None,
        "generation_kwargs": {"max_gen_toks": 2, "until": ["\n"]},
        "metric_list": [{"metric": "exact_match"}],
    }
    found = harness.run(model, byte_tokenizer.build(), [task(tmp_path, **changes)], batch_size=2)
    model.save_pretrained(tmp_path / "model")
    for _ in range(2):
        harness.record(tmp_path / "model", found)
        (listed,) = ModelCard.load(tmp_path / "model" / "README.md").data.eval_results
        assert type(listed.metric_value) is float


@needs_harness
def test_what_cannot_be_measured_or_told_apart_is_refused(model, tmp_path):
    one, other = task(tmp_path), task(tmp_path, "other", task="quiz")
    unknown = task(tmp_path, "unknown", metric_list=[{"metric": "nosuchmetric"}])
    for names, options, message in (
        ([one, other], {}, "both have a task quiz"),
        ([one], {"shots": 9}, "lm-eval could not measure"),
        ([unknown], {}, "measured nothing in the task unknown|could not measure|cannot be loaded"),
        ([""], {}, "a task has no name"),
        (["pape"], {}, "did you mean 'paper'"),
    ):
        with pytest.raises(ConfigError, match=message):
            harness.run(model, byte_tokenizer.build(), names, batch_size=2, **options)


@needs_harness
def test_prompts_that_are_cut_are_warned_of(model, tmp_path, capsys):
    long = task(tmp_path, doc_to_text="{{question * 40}}")
    harness.run(model, byte_tokenizer.build(), [long], batch_size=2)
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: lm-eval:")]
    assert len([line for line in warned if "runcat" in line and line.endswith(" such)")]) == 1, warned


@pytest.mark.parametrize("content", ['{"tasks": []}', '{"tasks": {"a": {"metrics": {}}}}', "[]", "{", "{}"])
def test_a_file_that_holds_no_evaluations(content, tmp_path):
    (tmp_path / harness.FILE).write_text(content)
    with pytest.raises(ConfigError, match="holds no evaluations"):
        harness.check_place(tmp_path)


def test_a_card_that_cannot_be_read(tmp_path):
    (tmp_path / "README.md").write_text("---\n[broken: yaml\n---\n")
    with pytest.raises(ConfigError, match="cannot read the model card"):
        harness.check_place(tmp_path)


@needs_harness
@pytest.mark.parametrize("batch_size", [1, 4])
def test_accuracies_are_those_of_the_models_own_probabilities(model, tmp_path, batch_size):
    right = normed = 0
    for each in QUESTIONS:
        scores = [told(model, each["question"], choice) for choice in each["choices"]]
        right += scores.index(max(scores)) == each["answer"]
        by_length = [score / len(choice) for score, choice in zip(scores, each["choices"], strict=True)]
        normed += by_length.index(max(by_length)) == each["answer"]
    found = harness.run(model, byte_tokenizer.build(), [task(tmp_path)], batch_size=batch_size)
    facts = found["quiz"]
    assert found.keys() == {"quiz"}
    assert facts["metrics"]["acc"]["value"] == pytest.approx(right / 5)
    assert facts["metrics"]["acc_norm"]["value"] == pytest.approx(normed / 5)
    # The error of a mean of five zeros and ones.
    expected = torch.tensor([1.0] * right + [0.0] * (5 - right)).std().item() / 5**0.5
    assert facts["metrics"]["acc"]["stderr"] == pytest.approx(expected)
    assert (facts["examples"], facts["of"], facts["shots"], facts["version"]) == (5, 5, 0, 2.0)
    assert facts["harness"].startswith("lm-eval ")


@needs_harness
def test_a_part_of_a_task_says_so_and_shots_are_examples(model, tmp_path):
    found = harness.run(model, byte_tokenizer.build(), [task(tmp_path)], batch_size=4, limit=2)
    assert (found["quiz"]["examples"], found["quiz"]["of"]) == (2, 5)
    assert next(harness.rows(found))[4] == "the first 2 of 5"
    one = task(tmp_path, "shots", fewshot_split="test", fewshot_delimiter="\n")
    found = harness.run(model, byte_tokenizer.build(), [one], batch_size=4, shots=1)
    assert found["shots"]["shots"] == 1


@needs_harness
def test_what_cannot_be_loaded_is_named(model, tmp_path):
    def refused(match, *names):
        with pytest.raises(ConfigError, match=match):
            harness.run(model, byte_tokenizer.build(), names, batch_size=1)

    refused("there is no task file none.yaml", "none.yaml")
    gone = task(tmp_path, "gone", dataset_kwargs={"data_files": {"test": str(tmp_path / "gone")}})
    refused("gone.yaml or its data cannot be loaded", task(tmp_path), gone)
    (tmp_path / "broken.yaml").write_text("task: [")
    refused("broken.yaml or its data cannot be loaded", str(tmp_path / "broken.yaml"))


@needs_harness
@pytest.mark.slow
def test_the_papers_tasks_are_known_to_the_harness(model):
    from lm_eval.tasks import TaskManager

    assert set(harness.SUITES["paper"]) <= set(TaskManager().all_tasks)
    with pytest.raises(ConfigError, match="lm-eval has no task 'hellaswagg'; did you mean 'hellaswag'"):
        harness.run(model, byte_tokenizer.build(), ["hellaswagg"], batch_size=1)


def test_without_the_harness_the_extra_is_named(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"pip install 'siamesenorm\[eval\]'"):
        harness.run(model, byte_tokenizer.build(), ["paper"], batch_size=1)


def facts(value, **changes):
    metrics = {"acc": {"value": value, "stderr": 0.125}, "odd": {"value": None, "stderr": None}}
    return {"metrics": metrics, "examples": 8, "of": 8, "shots": 0, "version": 1.0, "harness": "lm-eval 0.4", **changes}


def test_results_are_kept_beside_the_model_and_in_its_card(model, tmp_path):
    model.save_pretrained(tmp_path)
    file = harness.record(tmp_path, {"one": facts(0.25), "two": facts(0.5)})
    # What was measured in part takes no whole's place, and is none for the hub.
    parts = {name: facts(1.0, examples=2, of=8) for name in ("two", "part")}
    harness.record(tmp_path, {**parts, "three": facts(float("nan"))})
    kept = json.loads(file.read_text())["tasks"]
    assert {name: each["metrics"]["acc"]["value"] for name, each in kept.items()} == {
        "one": 0.25, "two": 0.5, "part": 1.0, "three": None,
    }  # fmt: skip
    card = ModelCard.load(tmp_path / "README.md")
    assert {(each.task_name, each.metric_value) for each in card.data.eval_results} == {("one", 0.25), ("two", 0.5)}
    assert card.text.count("## Evaluation\n") == 1
    assert "| one | acc | 0.2500 | 0.1250 | 8 | 0 |" in card.text
    assert "| two | acc | 0.5000 | 0.1250 | 8 | 0 |" in card.text
    assert "| part | acc | 1.0000 | 0.1250 | the first 2 of 8 | 0 |" in card.text
    assert card.text.index("## Evaluation\n") < card.text.index("## Citation\n")
    file.write_text("[]")
    with pytest.raises(ConfigError, match="holds no evaluations"):
        harness.record(tmp_path, {"one": facts(0.25)})
