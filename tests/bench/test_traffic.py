"""Streams that are read and written, against counts by hand."""

from __future__ import annotations

import pytest
import torch

from siamesenorm import ops
from siamesenorm.bench import floor, traffic
from siamesenorm.residual import NormSpec, make_scheme, parse_scheme

RMS = NormSpec("rms", 8)


def test_fused_pre_norm_by_hand():
    # A block's first read has no write to finish: it reads X and writes u. The second reads X and o, and writes X and
    # u. The block's last write reads X and o and writes X. Of two sublayers the mean:
    counted = traffic(make_scheme("pre"), RMS, "fused")
    assert counted.forward_read == (1 + 2 + 2) / 2
    assert counted.forward_written == (1 + 2 + 1) / 2
    # Backward: the stream, its gradient and u's are read, the stream's is written, which is the branch output's too.
    assert counted.backward_read == 3
    assert counted.backward_written == 1


def test_fused_siamese_by_hand():
    counted = traffic(make_scheme("siamese"), RMS, "fused")
    # X, Y to X̂, u; then X̂, Y, o to X, Y, X̂, u; at the end X̂, Y, o to X, Y, in two additions that read o twice.
    assert counted.forward_read == (2 + 3 + 4) / 2
    assert counted.forward_written == (2 + 4 + 2) / 2
    # X, Y and the gradients of X̂, Y, u to those of X, Y, o; without o in the first; the last write's gradient of o is
    # the scaled one of X, and that of Y added to it.
    assert counted.backward_read == (5 + 5 + 3) / 2
    assert counted.backward_written == (3 + 2 + 2) / 2


def test_a_plain_norm_is_read_and_written_operation_by_operation():
    pre = traffic(make_scheme("pre"), RMS, "plain")
    # x², its mean, x·r, ·w, and the write x + o: 1 + 1 + 1 + 1 + 2 read, 1 + 0 + 1 + 1 + 1 written.
    assert pre.forward_read == 6
    assert pre.forward_written == 4


@pytest.mark.parametrize("scheme", ["pre", "siamese", "siamese:x=hybrid", "lns"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_fused_reads_move_less_than_plain_ones_and_no_less_than_the_floor(scheme, kind):
    made = parse_scheme(scheme)
    plain, fused = (traffic(made, NormSpec(kind, 8), mode).total for mode in ("plain", "fused"))
    assert floor(2 if made.name == "siamese" else 1).total <= fused < plain


def test_streams_in_float32_are_two_of_a_bfloat16_model():
    narrow = traffic(make_scheme("siamese"), RMS, "fused", torch.bfloat16)
    wide = traffic(make_scheme("siamese", stream_dtype="float32"), RMS, "fused", torch.bfloat16)
    assert narrow.total < wide.total < 2 * narrow.total


def test_nothing_is_left_changed():
    before = ops.dispatch._EAGER, ops.dispatch._mode
    traffic(make_scheme("siamese"), RMS, "fused")
    assert (ops.dispatch._EAGER, ops.dispatch._mode) == before
