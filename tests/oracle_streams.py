"""The schemes of several streams in plain torch, from the equations alone; they join those of :mod:`tests.oracle`.

A scheme's streams are a list of tensors (…, d), added up one by one, so that no matrix can stand the wrong way round
unseen. What a scheme's readout learns is given to it as ``out``, by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tests.oracle import ORACLES, Result, Stack, rms_norm


def hyper(h: Tensor, stack: Stack, n: int = 4, dynamic: bool = True) -> Result:
    """arXiv 2409.19606, static and dynamic."""
    streams, states = [h] * n, []
    for part in stack.parts:
        w = part.weights
        a = [w["static_read"][i] for i in range(n)]
        b = [w["static_write"][i] for i in range(n)]
        r = [[w["static_mix"][i, j] for j in range(n)] for i in range(n)]
        if dynamic:
            normed = [part.norm("norm")(stream) for stream in streams]

            def term(i: int, name: str, row: int, scale: str, w=w, normed=normed) -> Tensor:
                return w[scale] * torch.tanh((normed[i] * w[name][row]).sum(-1, keepdim=True))

            a = [a[i] + term(i, "dynamic_read", 0, "scale_read") for i in range(n)]
            b = [b[i] + term(i, "dynamic_write", 0, "scale_write") for i in range(n)]
            r = [[r[i][j] + term(i, "dynamic_mix", j, "scale_read") for j in range(n)] for i in range(n)]
        o = part.normed(_weighted(a, streams))
        streams = [b[j] * o + _weighted([r[i][j] for i in range(n)], streams) for j in range(n)]
        states.append((torch.stack(streams, -2),))
    return sum(streams[1:], streams[0]), states


def doubly_stochastic(matrix: Tensor, iterations: int = 20) -> Tensor:
    """Sinkhorn and Knopp's: columns first, rows last."""
    for _ in range(iterations):
        matrix = matrix / matrix.sum(-2, keepdim=True)
        matrix = matrix / matrix.sum(-1, keepdim=True)
    return matrix


def mhc(h: Tensor, stack: Stack, eps: float, n: int = 4) -> Result:
    """arXiv 2512.24880."""
    streams, states = [h] * n, []
    for part in stack.parts:
        w = part.weights
        v = rms_norm(torch.cat(streams, -1), eps=eps)
        logits = {
            name: w[f"alpha_{name}"] * (v @ w[f"phi_{name}"].T) + w[f"bias_{name}"].reshape(-1)
            for name in ("read", "write", "mix")
        }
        p, q = 1 / (1 + torch.exp(-logits["read"])), 2 / (1 + torch.exp(-logits["write"]))
        m = doubly_stochastic(torch.exp(logits["mix"]).view(*h.shape[:-1], n, n))
        o = part.normed(_weighted([p[..., j, None] for j in range(n)], streams))
        streams = [q[..., i, None] * o + _weighted([m[..., i, j, None] for j in range(n)], streams) for i in range(n)]
        states.append((torch.stack(streams, -2),))
    return sum(streams[1:], streams[0]) / n, states


def attnres(h: Tensor, stack: Stack, eps: float, out: Mapping[str, Tensor], block_size: int | None = None) -> Result:
    """arXiv 2603.15031: the full form, or blocks of ``block_size`` sublayers with their running sum."""
    whole, running, states = [h], [], []
    for i, part in enumerate(stack.parts):
        o = part.normed(_softmax_read(part.weights["query"], [*whole, *running], eps))
        if block_size is None:
            whole.append(o)
        else:
            running = [running[0] + o] if running else [o]
            if (i + 1) % block_size == 0:
                whole, running = whole + running, []
        states.append((*whole, *running))
    return _softmax_read(out["query"], [*whole, *running], eps), states


def mgr(
    h: Tensor, stack: Stack, eps: float, out: Mapping[str, Tensor], n: int = 4, gates: str = "independent"
) -> Result:
    """arXiv 2605.23259, second-hand."""
    streams, states, scale = [h], [], 1 / math.sqrt(h.shape[-1])
    gated = len(stack.parts) - (n - 1)
    argument = math.sqrt(gated / 21) * (math.e**3 + 1) - n if gated > 0 else 0
    k = math.log(argument) if argument > 0 else 0.0
    for part in stack.parts:
        w = part.weights
        o = part.normed(_softmax_read(w["query"], streams, eps, scale))
        if len(streams) < n:
            streams = [*streams, o]
        else:
            scores = [scale * (rms_norm(s, eps=eps) @ w["gate_query"]) for s in streams]
            if gates == "independent":
                b = [1 / (1 + torch.exp(k - score)) for score in scores]
            else:
                total = math.exp(k) + sum(torch.exp(score) for score in scores)
                b = [torch.exp(score) / total for score in scores]
            streams = [(1 - bj[..., None]) * s + bj[..., None] * o for bj, s in zip(b, streams, strict=True)]
        states.append(tuple(streams))
    return _softmax_read(out["query"], streams, eps, scale), states


def _weighted(weights: Sequence[Tensor], streams: Sequence[Tensor]) -> Tensor:
    terms = [weight * stream for weight, stream in zip(weights, streams, strict=True)]
    return sum(terms[1:], terms[0])


def _softmax_read(query: Tensor, sources: Sequence[Tensor], eps: float, scale: float = 1.0) -> Tensor:
    stacked = torch.stack(list(sources), -2)
    weights = (scale * (rms_norm(stacked, eps=eps) @ query)).softmax(-1)
    return (weights[..., None] * stacked).sum(-2)


STREAMS = {"hyper": hyper, "mhc": mhc, "attnres": attnres, "mgr": mgr}
ORACLES.update(STREAMS)


def extras(scheme: str, eps: float, weights: Mapping[str, Tensor], readout: str) -> dict[str, object]:
    """What an oracle needs beside the scheme's options: its norms' eps, and what the readout named so learns."""
    given: dict[str, object] = {} if scheme == "hyper" else {"eps": eps}
    if scheme in ("attnres", "mgr"):
        given["out"] = {name.removeprefix(readout): w for name, w in weights.items() if name.startswith(readout)}
    return given
