"""A Transformer written by hand, in which every residual connection is one Stack.

    python examples/own_model.py

The branches have neither norms nor residual connections of their own: where these go is the scheme's business. So every
scheme of the package is one word away.
"""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import siamesenorm
from siamesenorm.residual import RMSNorm, Stack

WIDTH, HEADS, DEPTH, LENGTH = 32, 4, 4, 64


class Attention(nn.Module):
    # Some schemes normalise q, k and v per head, and ask whether attention does; this one always does.
    branch_norms = ("q", "k", "v")

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norms = nn.ModuleList(RMSNorm(WIDTH // HEADS) for _ in range(3))

    def forward(self, u, causal=True):
        heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(u).chunk(3, dim=-1))
        q, k, v = (norm(part) for norm, part in zip(self.norms, heads, strict=True))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class LanguageModel(nn.Module):
    def __init__(self, scheme, **options):
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        branches = [branch for _ in range(DEPTH) for branch in (Attention(), MLP())]
        self.stack = Stack(branches, scheme, WIDTH, **options)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, ids):
        h = self.embedding(ids) + self.positions.weight[: ids.shape[1]]
        return self.head(self.stack(h, attention={"causal": True}))


def main():
    ids = torch.tensor(list(Path(__file__).read_bytes()))
    ids = ids[: 8 * LENGTH].view(8, LENGTH)
    for scheme, options in (("pre", {}), ("siamese", {"x": "post"}), ("siamese", {"x": "hybrid"}), ("hyper", {"n": 2})):
        torch.manual_seed(0)
        model = LanguageModel(scheme, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for _ in range(20):
            logits = model(ids[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        with siamesenorm.probes.capture_streams(model) as streams:
            model(ids)
        sizes = ", ".join(f"{stream.square().mean().sqrt():.2f}" for stream in streams[-1])
        print(f"{model.stack.scheme.label:16} loss {losses[0]:.3f} to {losses[-1]:.3f}; streams at the end: {sizes}")


if __name__ == "__main__":
    main()
