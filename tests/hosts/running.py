"""What several tests do with a model: padding, decoding, training steps, sharding, compilation, a fresh start."""

from __future__ import annotations

import copy
import dataclasses

import torch

from siamesenorm import hosts, ops
from siamesenorm.residual import make_scheme, set_step
from siamesenorm.residual import scheme as scheme_module
from tests.hosts.tiny import tokens
from tests.parity import relative_error

GAINS = {"q": 2.0, "k": 3.0, "v": 5.0, "o": 7.0, "mlp": 11.0}


def padded(lengths, seq=13, side="left"):
    """Ids and mask of rows of ``lengths`` tokens, padded to ``seq``."""
    ids, mask = tokens(len(lengths), seq), torch.ones(len(lengths), seq, dtype=torch.long)
    for row, length in enumerate(lengths):
        padding = slice(0, seq - length) if side == "left" else slice(length, seq)
        ids[row, padding], mask[row, padding] = 0, 0
    return ids, mask


def positions_of(mask):
    return (mask.cumsum(-1) - 1).clamp_min(0)


def cache_of(out):
    return out.cache if "cache" in out else out.past_key_values


@torch.no_grad()
def by_hand(model, ids, mask, steps):
    """Greedy decoding without a cache."""
    for _ in range(steps):
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions_of(mask)).logits[:, -1]
        ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), 1)
        mask = torch.cat((mask, mask.new_ones(len(mask), 1)), 1)
    return ids


@torch.no_grad()
def token_by_token(model, ids, mask, cache):
    """The logits of decoding with ``cache``."""
    steps = []
    for t in range(ids.shape[1]):
        out = model(
            input_ids=ids[:, t : t + 1],
            attention_mask=mask[:, : t + 1],
            position_ids=positions_of(mask)[:, t : t + 1],
            cache=cache,
            use_cache=True,
        )
        assert cache_of(out) is cache
        steps.append(out.logits)
    return torch.cat(steps, 1)


@torch.no_grad()
def assert_padding_changes_nothing(model):
    """Not of an empty row either."""
    ids, mask = padded((8, 0, 5), 8)
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions_of(mask)).logits
    for row, length in ((0, 8), (2, 5)):
        alone = model(input_ids=ids[row : row + 1, 8 - length :]).logits
        assert relative_error(out[row, 8 - length :], alone[0]) < 1e-5


def assert_built_without_memory_as_with(given, is_constant, inputs=None, **more):
    """A model of `hosts.build(*given, **more)` on the meta device is initialised and loaded like any; ``is_constant``
    tells by the name which parameters start at the same values whatever the seed.
    """
    inputs = inputs or {"input_ids": tokens()}
    with torch.device("meta"):
        empty = hosts.build(*given, **more)
    assert all(p.is_meta for p in empty.parameters())
    real = hosts.build(*given, **more).eval()
    assert {n: p.shape for n, p in empty.named_parameters()} == {n: p.shape for n, p in real.named_parameters()}
    assert hosts.site_table(empty) == hosts.site_table(real)
    empty.to_empty(device="cpu")
    for parameter in empty.parameters():
        torch.nn.init.constant_(parameter, 9.0)
    for module in empty.modules():
        empty._init_weights(module)
    assert not any((p == 9).any() for p in empty.parameters())
    for n, parameter in empty.named_parameters():
        if is_constant(n):
            assert torch.equal(parameter, real.get_parameter(n)), n
    empty.load_state_dict(real.state_dict())
    assert torch.equal(empty.eval()(**inputs).logits, real(**inputs).logits)


def assert_checkpoints_change_nothing(model, step, reentrant, tolerance, dead=lambda name: False):
    """``step`` gives the loss and every gradient of a model; ``dead`` tells which the equations leave without one."""
    model = copy.deepcopy(model).train()
    set_step(model, hosts.scheme_of(model.config), 1)
    expected = step(model)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    got = step(model)
    for name in [name for name in expected[1] if dead(name)]:
        del got[1][name], expected[1][name]
    same(got, expected, tolerance)


def assert_one_graph_with_the_same_gradients(model, tolerance=1e-5, dead=lambda name: False):
    """``dead`` tells which parameters the equations leave without gradient."""
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    # What a compiler is given is the plain form.
    with ops.use("plain"):
        expected = model(input_ids=tokens(), use_cache=False).logits
    logits = compiled(input_ids=tokens(), use_cache=False).logits
    assert relative_error(logits, expected) < 1e-5
    live = {n: p for n, p in model.named_parameters() if not dead(n)}
    wanted, got = (torch.autograd.grad(out.square().sum(), list(live.values())) for out in (expected, logits))
    for n, a, b in zip(live, got, wanted, strict=True):
        assert relative_error(a, b) < tolerance, n


def trained(model, steps=3):
    """The losses of a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded(model, mesh, **policy):
    """The same model, each block cut on its own; the streams are not cast."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    made = MixedPrecisionPolicy(cast_forward_inputs=False, **policy)
    for block in hosts.blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=made)
    return fully_shard(model, mesh=mesh, mp_policy=made)


def step(model, **kwargs):
    """Loss and every gradient of one forward and backward."""
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=tokens(), labels=tokens(), **kwargs).loss
    loss.backward()
    return loss.detach(), {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def same(got, wanted, tolerance=1e-6):
    assert relative_error(got[0], wanted[0]) < tolerance
    assert got[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        assert gradient is not None, name
        assert got[1][name] is not None, name
        assert relative_error(got[1][name], gradient) < tolerance, name


def register_gains():
    @scheme_module.register
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Gains(type(make_scheme("siamese"))):
        name = "gains"

        def init_gain(self, role, site):
            return GAINS[role]
