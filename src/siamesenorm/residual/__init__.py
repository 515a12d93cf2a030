"""Residual schemes, on torch alone: the protocol, the norms, one file per scheme family, and a stack to use them in.

Start with ``scheme.py`` (what a scheme is), then ``siamese.py`` (SiameseNorm as its equations).
"""

from . import attnres, hybridnorm, hyper, mgr, mhc, post_variants, pre_variants, resi_dual, siamese, single
from .errors import ConfigError, nearest, one_line
from .fusing import Backend, Read, Term, register_backend, terms_of
from .norms import LayerNorm, Norm, NormSpec, RMSNorm
from .run import (
    Step,
    Watcher,
    close_streams,
    finished,
    open_by,
    open_streams,
    own_parameters,
    set_step,
    through,
    watched,
)
from .scheme import (
    Block,
    Carry,
    Readout,
    Scheme,
    Site,
    Streams,
    Sublayer,
    choose,
    count,
    make_scheme,
    parse_scheme,
    register,
    schemes,
)
from .stack import Stack, stack_sites

__all__ = [
    "Backend",
    "Block",
    "Carry",
    "ConfigError",
    "LayerNorm",
    "Norm",
    "NormSpec",
    "RMSNorm",
    "Read",
    "Readout",
    "Scheme",
    "Site",
    "Stack",
    "Step",
    "Streams",
    "Sublayer",
    "Term",
    "Watcher",
    "attnres",
    "choose",
    "close_streams",
    "count",
    "finished",
    "hybridnorm",
    "hyper",
    "make_scheme",
    "mgr",
    "mhc",
    "nearest",
    "one_line",
    "open_by",
    "open_streams",
    "own_parameters",
    "parse_scheme",
    "post_variants",
    "pre_variants",
    "register",
    "register_backend",
    "resi_dual",
    "schemes",
    "set_step",
    "siamese",
    "single",
    "stack_sites",
    "terms_of",
    "through",
    "watched",
]
