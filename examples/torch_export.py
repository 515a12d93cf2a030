"""torch.export of a rewired language model, for any batch and any length up to its positions.

python examples/torch_export.py
"""

import io

import torch
from torch import nn
from torch.export import Dim, export, load, save
from transformers import LlamaConfig, LlamaForCausalLM

import siamesenorm

POSITIONS = 64


class Logits(nn.Module):
    """A model from ids (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(input_ids=ids, use_cache=False).logits


def main():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
    )
    for form in ("post", "hybrid"):
        model = siamesenorm.rewire(LlamaForCausalLM(config), "siamese", x=form).eval()
        shapes = {"ids": {0: Dim("batch", max=16), 1: Dim("length", max=POSITIONS)}}
        exported = export(Logits(model), (torch.zeros(2, 9, dtype=torch.long),), dynamic_shapes=shapes)
        file = io.BytesIO()
        save(exported, file)
        file.seek(0)
        program = load(file).module()
        for batch, length in ((1, 1), (2, 9), (5, POSITIONS)):
            ids = torch.randint(0, 64, (batch, length))
            torch.testing.assert_close(program(ids), model(input_ids=ids).logits, rtol=1e-4, atol=1e-5)
        print(f"x={form!r}: exported, saved and loaded: the same logits for every batch and length")


if __name__ == "__main__":
    main()
