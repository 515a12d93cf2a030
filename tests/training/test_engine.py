"""The train module on its own: loss, gradients, weight decay, and what stops a step."""

from types import SimpleNamespace

import pytest
import torch
from olmo_core.optim import CosWithWarmup

from siamesenorm.hosts.configs import scheme_of as scheme_of_model
from siamesenorm.residual import make_scheme
from siamesenorm.training.build import build_model, check, parameter_counts
from siamesenorm.training.cost import flops_per_token
from siamesenorm.training.decay import undecayed
from siamesenorm.training.documents import DocumentMask
from siamesenorm.training.engine import EngineModule, _optimizer
from siamesenorm.training.evaluate import evaluate, held_out_sequences
from siamesenorm.training.events import NonFiniteError
from siamesenorm.training.routers import RouterLoss
from siamesenorm.training.settings import scheme_of
from siamesenorm.training.tasks.text import TokenObjective

CPU = torch.device("cpu")


def module_for(model, micro_batch_size, lr=0.1, max_grad_norm=None, mask=None, routers=None, **options):
    module = EngineModule(
        model,
        scheme_of_model(model.config),
        TokenObjective(model, CPU, mask=mask, routers=routers),
        torch.optim.SGD(model.parameters(), lr=lr),
        CosWithWarmup(warmup=0),
        micro_batch_size=micro_batch_size,
        max_grad_norm=max_grad_norm,
        seed=0,
        device=CPU,
        **options,
    )
    module._trainer = SimpleNamespace(global_step=5, max_steps=10, record_metric=lambda *_, **__: None)
    module.record_ce_loss = lambda *_: None
    return module


@pytest.fixture
def model(tiny):
    return build_model(tiny("model.config.attention_dropout=0.0")).double()


def uneven_batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 256, (8, 16), generator=generator)
    counted = torch.zeros(8, 16, dtype=torch.bool)
    for row, length in enumerate([16, 1, 0, 7, 2, 16, 3, 9]):
        counted[row, :length] = True
    return {"input_ids": ids, "label_mask": counted}


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_micro_batches_change_neither_loss_nor_gradients(model):
    found = []
    for size in (8, 1, 2):
        module = module_for(model, size)
        module.zero_grads()
        module.train_batch(uneven_batch())
        found.append((module._batch_losses[0].item(), gradients(model)))
    for loss, grads in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, found[0][1][name], rtol=1e-9, atol=1e-12)


def test_the_loss_is_the_mean_over_counted_next_tokens(model):
    batch = uneven_batch()
    module = module_for(model, 2)
    module.train_batch({**batch})
    with torch.no_grad():
        log_probabilities = model(input_ids=batch["input_ids"], use_cache=False).logits.log_softmax(-1)
    terms = [
        -log_probabilities[row, at, batch["input_ids"][row, at + 1]]
        for row in range(8)
        for at in range(15)
        if batch["label_mask"][row, at + 1]
    ]
    assert module._batch_losses[0].item() == pytest.approx(torch.stack(terms).mean().item(), rel=1e-6)


def test_a_batch_without_a_counted_token_gives_zero_and_not_nan(model):
    module = module_for(model, 4)
    batch = uneven_batch()
    batch["label_mask"][:] = False
    module.train_batch(batch)
    assert module._batch_losses[0].item() == 0
    assert all(grad.abs().max() == 0 for grad in gradients(model).values())
    module.optim_step()
    assert module.loss == 0


def test_a_micro_batch_without_a_counted_token_changes_nothing(model):
    full = uneven_batch()
    full["label_mask"][4:] = False
    module = module_for(model, 4)
    module.train_batch(full)
    loss, grads = module._batch_losses[0].item(), gradients(model)
    module.zero_grads()
    module.train_batch({key: value[:4] for key, value in uneven_batch().items()})
    assert module._batch_losses[0].item() == pytest.approx(loss, rel=1e-6)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, grads[name], rtol=1e-9, atol=1e-12)


def test_labels_that_are_given_are_not_shifted_again(model):
    ids = uneven_batch()["input_ids"]
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    module = module_for(model, 8)
    module.train_batch({"input_ids": ids})
    own = module._batch_losses[0].item()
    module.train_batch({"input_ids": ids, "labels": shifted})
    assert module._batch_losses[0].item() == own


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stops_before_the_step(model, where, value):
    module = module_for(model, 8, max_grad_norm=1.0)
    module.train_batch(uneven_batch())
    if where == "loss":
        module._batch_losses[0] = value
    else:
        next(model.parameters()).grad[0, 0] = value
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(NonFiniteError, match="step 5") as caught:
        module.optim_step()
    assert caught.value.step == 5
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_gradients_are_clipped_to_the_norm_that_is_reported_before(model):
    module = module_for(model, 8, lr=0.0, max_grad_norm=0.5)
    module.train_batch(uneven_batch())
    module.optim_step()
    after = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    assert module.grad_norm > 0.5
    assert after.item() == pytest.approx(0.5, rel=1e-4)


def test_dropout_is_decided_by_seed_and_step_alone(tiny):
    model = build_model(tiny("model.config.attention_dropout=0.5"))
    module, losses = module_for(model, 8), []
    for step in (5, 6, 5):
        module._trainer.global_step = step
        torch.rand(step)
        module.train_batch(uneven_batch())
        losses.append(module._batch_losses[0].item())
    assert losses[0] == losses[2] != losses[1]


@pytest.mark.parametrize("options", [["model.options.x=post"], ["model.options.x=hybrid"], ["model.scheme=pre"]])
@pytest.mark.parametrize("tied", ["true", "false"])
def test_weight_decay_reaches_matrices_only(tiny, options, tied):
    recipe = tiny(*options, f"model.config.tie_word_embeddings={tied}")
    model = build_model(recipe)
    optim = _optimizer(model, scheme_of(recipe), recipe)
    decayed = {id(p) for group in optim.param_groups if group["weight_decay"] for p in group["params"]}
    held = [id(p) for group in optim.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    assert [name for name, p in model.named_parameters() if id(p) in decayed and p.ndim < 2] == []
    left = {name for name, p in model.named_parameters() if p.ndim >= 2 and id(p) not in decayed}
    assert left == {"model.embed_tokens.weight"}
    assert any(p.ndim < 2 for p in model.parameters())


def test_weight_decay_options(tiny):
    recipe = tiny("optim.decay_all=true")
    model = build_model(recipe)
    assert undecayed(model, scheme_of(recipe), recipe.optim) == []
    assert len(_optimizer(model, scheme_of(recipe), recipe).param_groups) == 1
    recipe = tiny("optim.decay_embeddings=true")
    assert "model.embed_tokens.weight" not in undecayed(model, scheme_of(recipe), recipe.optim)


def test_what_a_scheme_exempts_is_not_decayed(tiny):
    recipe = tiny()
    exempting = SimpleNamespace(decay=lambda name: "q_proj" not in name)
    names = undecayed(build_model(recipe), exempting, recipe.optim)
    assert [name for name in names if "proj" in name] == [
        f"model.layers.{block}.self_attn.q_proj.weight" for block in range(2)
    ]


def test_the_scheme_changes_no_shared_weight(tiny):
    siamese, pre = build_model(tiny()).state_dict(), build_model(tiny("model.scheme=pre")).state_dict()
    shared = siamese.keys() & pre.keys()
    assert len(shared) > 15
    assert all(torch.equal(siamese[name], pre[name]) for name in shared)
    assert not torch.equal(siamese["lm_head.weight"], build_model(tiny("seed=1")).state_dict()["lm_head.weight"])


def test_held_out_loss_does_not_depend_on_the_batch_size(model):
    tokens = torch.randint(0, 256, (163,), generator=torch.Generator().manual_seed(3)).numpy()
    sequences = held_out_sequences([tokens], 16, 7)
    assert sequences.shape == (7, 16)
    model.train()
    found = [evaluate(model, sequences, batch_size=size, device=CPU) for size in (1, 3, 7)]
    assert model.training
    assert found[0].tokens == 7 * 15
    assert found[1].loss == pytest.approx(found[0].loss, rel=1e-12)
    assert found[2].loss == pytest.approx(found[0].loss, rel=1e-12)
    ids = torch.as_tensor(sequences)
    with torch.no_grad():
        transformers_own = model.eval()(input_ids=ids, labels=ids).loss
    assert found[0].loss == pytest.approx(transformers_own.item(), rel=1e-6)


def test_parameters_and_flops_are_counted(tiny):
    config = ["model.config.num_key_value_heads=2", "model.scheme=pre"]
    model = check(tiny(*config))
    total, non_embedding = parameter_counts(model)
    matrices = 2 * (4 * 16 * 16 + 3 * 16 * 24)
    assert (total, non_embedding) == (matrices + 2 * 258 * 16 + 5 * 16, matrices + 5 * 16)
    # Two per multiply-add of every matrix, and queries against keys, weights against values in both blocks.
    assert flops_per_token(model, 16).products == 2 * (matrices + 258 * 16) + 2 * 4 * 16 * 16
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    siamese = flops_per_token(check(tiny(config[0], "model.options.x=post")), 16)
    assert siamese.products == flops_per_token(model, 16).products
    assert siamese.elementwise > flops_per_token(model, 16).elementwise
    tied = check(tiny(*config, "model.config.tie_word_embeddings=true"))
    assert parameter_counts(tied) == (total - 258 * 16, non_embedding)


def test_make_scheme_and_recipe_agree(tiny):
    assert scheme_of(tiny()).options() == make_scheme("siamese", x="hybrid").options()


MOE = [
    "model.host=olmoe",
    "model.config.attention_dropout=0.0",
    "model.config.num_experts=4",
    "model.config.num_experts_per_tok=2",
]


@pytest.mark.parametrize("host", ["olmoe", "qwen3_moe", "mixtral"])
def test_the_routers_loss_is_the_hosts_over_each_sequence(tiny, host):
    experts = "num_local_experts" if host == "mixtral" else "num_experts"
    model = build_model(tiny(f"model.host={host}", f"model.config.{experts}=4", *MOE[1:2], MOE[3])).eval()
    routers = RouterLoss.of(model, "sequence")
    ids = uneven_batch()["input_ids"]
    out = model(input_ids=ids, output_router_logits=True)
    expected = sum(model(input_ids=row[None], output_router_logits=True).aux_loss for row in ids)
    assert routers(out.router_logits, len(ids)).item() == pytest.approx(expected.item(), rel=1e-6)
    whole = RouterLoss.of(model, "micro_batch")(out.router_logits, len(ids))
    assert whole.item() == pytest.approx(8 * out.aux_loss.item(), rel=1e-6)
    assert whole.item() != pytest.approx(expected.item(), rel=1e-4)


def test_micro_batches_of_experts_change_neither_losses_nor_gradients(tiny):
    model = build_model(tiny(*MOE, "model.config.router_aux_loss_coef=0.5"))
    found = []
    for size in (8, 1):
        module = module_for(model, size, routers=RouterLoss.of(model, "sequence"))
        module.zero_grads()
        module.train_batch(uneven_batch())
        found.append((module._batch_losses.clone(), gradients(model)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=0)
    for name, grad in found[0][1].items():
        torch.testing.assert_close(grad, found[1][1][name], rtol=1e-4, atol=1e-6)
    without = module_for(model, 8)
    without.zero_grads()
    without.train_batch(uneven_batch())
    assert not torch.allclose(model.model.layers[0].mlp.gate.weight.grad, found[0][1]["model.layers.0.mlp.gate.weight"])


@pytest.mark.parametrize("host", ["olmoe", "qwen3_moe", "mixtral"])
def test_experts_train_on_documents_that_are_kept_apart(tiny, host):
    experts = "num_local_experts" if host == "mixtral" else "num_experts"
    model = build_model(tiny(f"model.host={host}", f"model.config.{experts}=4", *MOE[1:2], MOE[3]))
    mask = DocumentMask(eos_id=7)
    ids = uneven_batch()["input_ids"]
    ids[:, 5] = 7
    module = module_for(model, 4, routers=RouterLoss.of(model, "sequence"), mask=mask)
    module.train_batch({"input_ids": ids})
    inputs = mask.inputs(model, ids)
    body = model.model(input_ids=ids, output_router_logits=True, use_cache=False, **inputs)
    expected = RouterLoss.of(model, "sequence")(body.router_logits, len(ids)) / len(ids)
    assert module._batch_losses[1].item() == pytest.approx(expected.item(), rel=1e-5)
    assert all(p.grad is not None for n, p in model.named_parameters() if "gate.weight" in n)
    assert not model.model._forward_pre_hooks


def test_dense_models_have_no_routers(model):
    assert RouterLoss.of(model, "sequence") is None


@pytest.mark.parametrize("sublayer", range(4))
def test_the_first_sublayer_whose_streams_overflow_is_named(model, sublayer):
    module = module_for(model, 4)
    block = model.model.layers[sublayer // 2]
    with torch.no_grad():
        (block.mlp.down_proj if sublayer % 2 else block.self_attn.o_proj).weight[0, 0] = float("inf")
    module.train_batch(uneven_batch())
    kind = "mlp" if sublayer % 2 else "attention"
    named = rf"streams overflowed first in sublayer {sublayer} \(block {sublayer // 2}, {kind}\)"
    with pytest.raises(NonFiniteError, match=named):
        module.optim_step()
    assert not any("write" in vars(part) for part in model.modules())


def test_an_overflow_of_gradients_alone_is_named_from_the_end(model):
    module = module_for(model, 8)
    module.train_batch(uneven_batch())
    for block in model.model.layers:
        block.mlp.up_proj.weight.grad[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"gradients overflowed first in sublayer 3 \(block 1, mlp\)"):
        module.optim_step()


def test_steps_that_are_not_finite_are_skipped_up_to_a_number_in_a_row(model):
    module = module_for(model, 8, skip_nonfinite=2)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}

    def step(bad):
        module.zero_grads()
        module.train_batch(uneven_batch())
        if bad:
            next(model.parameters()).grad[0, 0] = float("inf")
        module.optim_step()
        return module.skipped

    assert [step(True), step(True)] == [True, True]
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert [step(False), step(True), step(True)] == [False, True, True]
    assert not torch.equal(model.lm_head.weight, before["lm_head.weight"])
    with pytest.raises(NonFiniteError):
        step(True)
