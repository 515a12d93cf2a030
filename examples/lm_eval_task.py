"""The language model evaluation harness on a saved model, with a task of one's own.

    python examples/lm_eval_task.py     (takes the extra "eval")

The task is quiz.yaml, beside this file, in lm-eval's own form. `siamesenorm eval MODEL --tasks examples/quiz.yaml` does
the same from the command line, and keeps the results beside the model and in its card.
"""

import tempfile
from pathlib import Path

import lm_eval
import torch
import yaml
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import siamesenorm
from siamesenorm.data import byte_tokenizer

HERE = Path(__file__).parent


def saved_model(folder):
    config = LlamaConfig(
        vocab_size=byte_tokenizer.VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    siamesenorm.rewire(LlamaForCausalLM(config), "siamese").save_pretrained(folder)


def main():
    torch.manual_seed(0)
    task = yaml.safe_load((HERE / "quiz.yaml").read_text())
    task["dataset_kwargs"]["data_files"]["test"] = str(HERE / "quiz.jsonl")
    with tempfile.TemporaryDirectory() as folder:
        saved_model(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
    found = lm_eval.simple_evaluate(
        HFLM(model, tokenizer=byte_tokenizer.build(), batch_size=2),
        tasks=[task],
        task_manager=TaskManager(include_defaults=False),
    )
    accuracy, count = found["results"]["quiz"]["acc,none"], found["n-samples"]["quiz"]["effective"]
    print(f"accuracy {accuracy:.2f} on {count} questions; the model has learnt nothing yet")


if __name__ == "__main__":
    main()
