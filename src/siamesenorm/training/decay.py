"""Which parameters weight decay reaches."""

from __future__ import annotations

from torch import Tensor, nn

from siamesenorm.residual import Scheme
from siamesenorm.training.recipe import OptimRecipe


def undecayed(model: nn.Module, scheme: Scheme, optim: OptimRecipe) -> list[str]:
    """The names of the trainable parameters that weight decay leaves alone, in the model's order.

    They are all parameters of fewer than two dimensions (norms, biases, scalars, vectors), what the scheme exempts, and
    unless ``optim.decay_embeddings`` the tables of embeddings: of tokens, positions and classes; none at all with
    ``optim.decay_all``.
    """
    if optim.decay_all:
        return []
    tables: set[Tensor] = set()
    if not optim.decay_embeddings:
        tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
        # ViT keeps its class token and positions as (1, tokens, width), so that they go with a batch.
        tables |= {parameter for parameter in model.parameters() if parameter.ndim == 3 and len(parameter) == 1}
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (parameter.ndim < 2 or not scheme.decay(name) or parameter in tables)
    ]
