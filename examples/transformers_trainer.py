"""transformers' Trainer on a rewired model: the same as on any other, but for one line about weight decay.

    python examples/transformers_trainer.py

Trainer knows norms by the names of transformers' own, so that it has to be told that a scheme's are norms too.
"""

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import siamesenorm

LENGTH = 64


class ResidualTrainer(Trainer):
    def get_decay_parameter_names(self, model):
        return [name for name, parameter in model.named_parameters() if parameter.ndim > 1]


def sequences():
    """This file as bytes, in sequences."""
    ids = torch.tensor(list(Path(__file__).read_bytes()))
    return [{"input_ids": part, "labels": part} for part in ids.split(LENGTH) if len(part) == LENGTH]


def main():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4
    )
    model = siamesenorm.rewire(LlamaForCausalLM(config), "siamese", x="hybrid")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=20,
            per_device_train_batch_size=4,
            learning_rate=3e-3,
            weight_decay=0.1,
            logging_steps=5,
            disable_tqdm=True,
            report_to="none",
            use_cpu=True,
        )
        trainer = ResidualTrainer(model, arguments, train_dataset=sequences())
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        trainer.save_model(folder)
        again = AutoModelForCausalLM.from_pretrained(folder)
    decayed = {id(p) for group in trainer.optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    assert not any(id(parameter) in decayed for parameter in model.parameters() if parameter.ndim == 1)
    print(f"loss {losses[0]} over the first steps, {losses[-1]} over the last")
    ids = sequences()[0]["input_ids"][None]
    assert torch.equal(again.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    print("saved and loaded: the same logits")


if __name__ == "__main__":
    main()
