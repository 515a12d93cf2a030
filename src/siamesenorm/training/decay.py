"""Which parameters weight decay reaches."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from siamesenorm.residual import Scheme
from siamesenorm.training.recipe import OptimRecipe


def undecayed(model: PreTrainedModel, scheme: Scheme, optim: OptimRecipe) -> list[str]:
    """The names of the trainable parameters that weight decay leaves alone, in the model's order.

    They are all parameters of fewer than two dimensions (norms, biases, scalars, vectors), what the scheme exempts, and
    the table of input embeddings unless ``optim.decay_embeddings``; none at all with ``optim.decay_all``.
    """
    if optim.decay_all:
        return []
    embeddings = model.get_input_embeddings()
    table = embeddings.weight if isinstance(embeddings, nn.Embedding) and not optim.decay_embeddings else None
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (parameter.ndim < 2 or not scheme.decay(name) or parameter is table)
    ]
