"""A training loop with accelerate: gradients added up over micro-batches, a state to resume from, a model to load.

accelerate launch examples/accelerate_loop.py     (or: python examples/accelerate_loop.py)
"""

import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import siamesenorm

LENGTH = 64


def new_model():
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4
    )
    return siamesenorm.rewire(LlamaForCausalLM(config), "siamese", x="post")


def sequences():
    """This file as bytes, in sequences."""
    ids = torch.tensor(list(Path(__file__).read_bytes()))
    return [part for part in ids.split(LENGTH) if len(part) == LENGTH]


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = new_model()
    # Norms, scalars and vectors stay out of weight decay, those of the scheme as those of the host.
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    batches = DataLoader(sequences(), batch_size=4, shuffle=True)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    losses = []
    for _ in range(4):
        for ids in batches:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    accelerator.print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} in the end")
    with tempfile.TemporaryDirectory() as own:
        # All processes write to and read from the folder of the first.
        (folder,) = broadcast_object_list([own])
        accelerator.save_state(f"{folder}/state")
        accelerator.unwrap_model(model).save_pretrained(f"{folder}/model", is_main_process=accelerator.is_main_process)
        accelerator.wait_for_everyone()
        again = AutoModelForCausalLM.from_pretrained(f"{folder}/model")
        expected = model(input_ids=ids).logits
        assert torch.equal(again.train()(input_ids=ids).logits, expected)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        accelerator.load_state(f"{folder}/state")
        accelerator.wait_for_everyone()
    assert torch.equal(model(input_ids=ids).logits, expected)
    accelerator.print("the model and the state, saved and loaded: the same logits")


if __name__ == "__main__":
    main()
