"""Measurements on a model as it runs, and on what a run wrote down.

A model is any that is rewired, or a :class:`~siamesenorm.residual.Stack`; batches say how it is run and judged
(:class:`Batch`). Each module's docstring defines what it measures: ``sites.py`` what passes through each sublayer,
``terms.py`` what a branch reads of each stream, ``depth.py`` what depth does, ``stability.py`` spikes, ``overflow.py``
where numbers stop being finite. No probe keeps more of a model's activations than one block's, beyond what the forward
pass itself keeps, and each leaves the model as it was.
"""

from .capture import capture_streams
from .depth import DEPTH_PROBES, Depth, depth_tables, effective_rank, participation, removed
from .sites import site_table
from .stability import spike_score, spikes
from .subject import Batch, categorical, unit_gaussian
from .terms import read_terms, shares_of

__all__ = [
    "DEPTH_PROBES",
    "Batch",
    "Depth",
    "capture_streams",
    "categorical",
    "depth_tables",
    "effective_rank",
    "participation",
    "read_terms",
    "removed",
    "shares_of",
    "site_table",
    "spike_score",
    "spikes",
    "unit_gaussian",
]
