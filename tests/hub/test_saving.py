"""Saved models: through every Auto class, sharded or not, in this process and in one that knows only the names."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import siamesenorm
from siamesenorm import hosts, hub
from siamesenorm.residual import ConfigError
from tests.hosts.tiny import FAMILIES, PREFIX, SCHEMES, SHAPE, SIAMESE, config, host, rewired, scatter, shared, tokens

OPTIONS = {
    "post-pre": {"x": "post", "depth_scale": "paper", "normalized_input": False},
    "hybrid-pre": {"x": "hybrid", "first_block_pre": True, "stream_dtype": "float32"},
}


def hashes(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.glob("*.safetensors*"))}


def saved(model, folder, **kwargs):
    model.save_pretrained(folder, **kwargs)
    return folder


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_bits_after_loading(family, scheme, tied, tmp_path):
    model = rewired(family, scheme, tie_word_embeddings=tied)
    saved(model, tmp_path)
    logits = model(input_ids=tokens()).logits
    for again in (transformers.AutoModelForCausalLM.from_pretrained(tmp_path), hub.load(tmp_path)):
        assert type(again) is type(model)
        assert again.config.to_dict() == transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
        assert torch.equal(again(input_ids=tokens()).logits, logits)
        assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("scheme", SIAMESE)
def test_options_survive(scheme, tmp_path):
    model = siamesenorm.rewire(host("qwen3"), "siamese", **OPTIONS[scheme])
    for parameter in scatter(model).parameters():
        parameter.data = parameter.data.bfloat16()
    again = transformers.AutoModelForCausalLM.from_pretrained(saved(model, tmp_path))
    assert hosts.scheme_of(again.config) == hosts.scheme_of(model.config)
    assert hosts.scheme_of(again.config).options().items() >= OPTIONS[scheme].items()
    assert again.dtype == torch.bfloat16
    assert torch.equal(again(input_ids=tokens()).logits, model(input_ids=tokens()).logits)


def test_the_config_says_what_it_is(tmp_path):
    saved(rewired("llama", "hybrid-pre"), tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "siamesenorm_llama"
    assert written["architectures"] == ["ResidualLlamaForCausalLM"]
    assert written["residual_scheme"] == {
        "format": 1,
        "name": "siamese",
        "stream_dtype": None,
        "warmup_steps": None,
        "x": "hybrid",
        "first_block_pre": False,
        "normalized_input": True,
        "depth_scale": "code",
        "x_init": 1.0,
        "y_init": 1.0,
        "y_eps": None,
        "topology": "siamese",
    }
    assert not any(path.suffix in (".bin", ".pt", ".pth") for path in tmp_path.iterdir())
    assert transformers.AutoConfig.from_pretrained(tmp_path).num_hidden_layers == 3


@pytest.mark.parametrize("scheme", SIAMESE)
def test_sharded_saving(scheme, tmp_path):
    model = shared("llama", scheme)
    saved(model, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    for again in (transformers.AutoModelForCausalLM.from_pretrained(tmp_path), hub.load(tmp_path)):
        assert torch.equal(again(input_ids=tokens()).logits, model(input_ids=tokens()).logits)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_saving_what_was_loaded_gives_the_same_files(scheme, tied, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    saved(rewired("llama", scheme, tie_word_embeddings=tied), first)
    saved(transformers.AutoModelForCausalLM.from_pretrained(first), second)
    assert hashes(first) == hashes(second)
    assert (first / "config.json").read_bytes() == (second / "config.json").read_bytes()


@pytest.mark.parametrize("scheme", SIAMESE)
def test_x_init_zero_is_a_start_and_not_a_law(scheme, tmp_path):
    name, options = SCHEMES[scheme]
    fresh = siamesenorm.rewire(host(), name, **options, x_init=0)
    again = transformers.AutoModelForCausalLM.from_pretrained(saved(fresh, tmp_path / "fresh"))
    started = {n: p for n, p in again.named_parameters() if n.endswith(("norm_x.weight", "c1"))}
    assert len(started) == 7
    assert all((p == 0).all() for p in started.values())
    trained = scatter(fresh)
    again = transformers.AutoModelForCausalLM.from_pretrained(saved(trained, tmp_path / "trained"))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), trained.parameters(), strict=True))
    assert all((p != 0).any() for n, p in again.named_parameters() if n.endswith(("norm_x.weight", "c1")))


def test_a_built_model_saves_and_loads(tmp_path):
    for name, options in SCHEMES.values():
        model = hosts.build("qwen3", SHAPE, name, options).eval()
        again = hub.load(saved(model, tmp_path / f"{name}{options.get('x')}"))
        assert torch.equal(again(input_ids=tokens()).logits, model(input_ids=tokens()).logits)


def test_other_auto_classes(tmp_path):
    model = shared("llama", "hybrid-pre")
    saved(model, tmp_path)
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert type(base).__name__ == "ResidualLlamaModel"
    hidden = base(input_ids=tokens()).last_hidden_state
    assert torch.equal(hidden, model.model(input_ids=tokens()).last_hidden_state)
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert type(classifier).__name__ == "ResidualLlamaForSequenceClassification"
    assert torch.equal(classifier.model(input_ids=tokens()).last_hidden_state, hidden)
    again = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    assert type(again) is type(model)
    assert len(hosts.blocks(again)) == 3


def test_a_base_model_and_a_classifier_save_and_load(tmp_path):
    base = scatter(siamesenorm.rewire(host().model, "siamese"))
    again = transformers.AutoModel.from_pretrained(saved(base, tmp_path / "base"))
    assert torch.equal(again(input_ids=tokens()).last_hidden_state, base(input_ids=tokens()).last_hidden_state)
    classifier = transformers.LlamaForSequenceClassification(config("llama", num_labels=3)).eval()
    scatter(siamesenorm.rewire(classifier, "siamese", x="hybrid"))
    again = transformers.AutoModelForSequenceClassification.from_pretrained(saved(classifier, tmp_path / "head"))
    assert torch.equal(again(input_ids=tokens()).logits, classifier(input_ids=tokens()).logits)


def test_a_language_model_on_top_of_a_saved_base_model(tmp_path):
    base = scatter(siamesenorm.rewire(host().model, "siamese"))
    model = transformers.AutoModelForCausalLM.from_pretrained(saved(base, tmp_path))
    assert torch.equal(model.model(input_ids=tokens()).last_hidden_state, base(input_ids=tokens()).last_hidden_state)


def test_loading_in_another_dtype(tmp_path):
    saved(shared(), tmp_path)
    model = hub.load(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    expected = shared()(input_ids=tokens()).logits
    assert (model(input_ids=tokens()).logits - expected).abs().max() < 0.1 * expected.abs().max()


def test_a_plain_model_loads_too_and_an_adapted_one_onto_it(tmp_path):
    import peft

    plain = host()
    again = hub.load(saved(plain, tmp_path / "plain"))
    assert type(again) is transformers.LlamaForCausalLM
    assert torch.equal(again(input_ids=tokens()).logits, plain(input_ids=tokens()).logits)

    model = rewired("llama", "hybrid-pre")
    saved(model, tmp_path / "model")
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, adapter).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(hub.load(tmp_path / "model"), tmp_path / "adapter").eval()
    assert torch.equal(again(input_ids=tokens()).logits, adapted(input_ids=tokens()).logits)


# What is wrong with a checkpoint


def changed(folder, change):
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "key",
    [
        "model.layers.1.mlp_residual.norm_x.weight",
        "model.norm.readout.norm_y.weight",
        "model.layers.0.mlp.up_proj.weight",
    ],
)
def test_missing_weights_are_listed(key, tmp_path):
    other = "model.layers.2.attn_residual.c1"
    saved(shared("llama", "hybrid-pre"), tmp_path)
    changed(tmp_path, lambda weights: (weights.pop(key), weights.pop(other)))
    for load in (hub.load, transformers.AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ConfigError, match=f"missing keys.*{other}") as error:
            load(tmp_path)
        assert key in str(error.value)


def test_a_missing_head_is_listed_by_load(tmp_path):
    saved(shared(), tmp_path)
    changed(tmp_path, lambda weights: weights.pop("lm_head.weight"))
    with pytest.raises(ConfigError, match=r"missing keys.*lm_head\.weight"):
        hub.load(tmp_path)


def test_weights_left_over_are_listed(tmp_path):
    saved(shared(), tmp_path)
    changed(tmp_path, lambda weights: weights.update({"model.layers.0.attn_residual.c1": torch.ones(32)}))
    for load in (hub.load, transformers.AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ConfigError, match=r"unexpected keys.*model\.layers\.0\.attn_residual\.c1"):
            load(tmp_path)


def test_weights_of_another_shape_are_an_error(tmp_path):
    saved(shared(), tmp_path)
    changed(tmp_path, lambda weights: weights.update({"model.layers.0.attn_residual.norm_x.weight": torch.ones(31)}))
    with pytest.raises(ConfigError, match=r"attn_residual\.norm_x\.weight"):
        hub.load(tmp_path)


def test_a_pre_norm_checkpoint_is_not_taken_for_another_scheme(tmp_path):
    saved(shared("llama", "post-pre"), tmp_path)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    written["residual_scheme"]["x"] = "hybrid"
    path.write_text(json.dumps(written))
    with pytest.raises(ConfigError, match=r"missing keys.*attn_residual\.c1"):
        hub.load(tmp_path)


def broken(what):
    def breaking(folder):
        path = folder / "config.json"
        written = json.loads(path.read_text())
        if what == "gone":
            return folder / "nowhere"
        if what == "file":
            return path
        if what == "no config":
            path.unlink()
        elif what == "broken json":
            path.write_text(path.read_text()[:50])
        elif what == "binary config":
            path.write_bytes(b"\xff\xfe\x00")
        elif what == "list config":
            path.write_text("[1, 2]")
        elif what == "empty config":
            path.write_text("{}")
        elif what == "no weights":
            (folder / "model.safetensors").unlink()
        elif what == "truncated weights":
            data = (folder / "model.safetensors").read_bytes()
            (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
        elif what == "empty weights":
            (folder / "model.safetensors").write_bytes(b"")
        elif what == "garbage weights":
            (folder / "model.safetensors").write_bytes(b"\x00" * 64)
        elif callable(what):
            what(written)
            path.write_text(json.dumps(written))
        return folder

    return breaking


BROKEN = [
    ("gone", "no model directory"),
    ("file", "no model directory"),
    ("no config", "no config.json"),
    ("broken json", "cannot read"),
    ("binary config", "cannot read"),
    ("list config", "config"),
    ("empty config", "model_type"),
    ("no weights", "no weights"),
    ("truncated weights", "cannot load"),
    ("empty weights", "cannot load"),
    ("garbage weights", "cannot load"),
    (lambda c: c.update(residual_scheme=None), "residual_scheme"),
    (lambda c: c.pop("residual_scheme"), "residual_scheme"),
    (lambda c: c.update(residual_scheme="siamese"), "residual_scheme"),
    (lambda c: c["residual_scheme"].pop("name"), "residual_scheme"),
    (lambda c: c["residual_scheme"].update(name="siamse"), "did you mean 'siamese'"),
    (lambda c: c["residual_scheme"].update(depth_scale="cod"), "did you mean 'code'"),
    (lambda c: c["residual_scheme"].update(colour="red"), "no option 'colour'"),
    (lambda c: c["residual_scheme"].update(format=2), "newer version"),
    (lambda c: c["residual_scheme"].update(format="two"), "format"),
    (lambda c: c["residual_scheme"].update(format=None), "format"),
    (lambda c: c.update(model_type="siamesenorm_lama"), "siamesenorm_lama"),
    (lambda c: c.update(hidden_size="wide"), "hidden_size"),
    (lambda c: c.update(hidden_size=48), "cannot load|mismatched"),
    (lambda c: c.update(residual_norm={"kind": "batch"}), "batch"),
    (lambda c: c.update(residual_norm={"colour": "red"}), "colour"),
]


@pytest.mark.parametrize(
    ("what", "message"), BROKEN, ids=[str(i) if callable(w) else w for i, (w, _) in enumerate(BROKEN)]
)
def test_what_can_be_wrong_with_a_directory(what, message, tmp_path):
    saved(shared(), tmp_path)
    with pytest.raises(ConfigError, match=message) as error:
        hub.load(broken(what)(tmp_path))
    assert "\n" not in str(error.value)


def test_a_shard_that_is_gone(tmp_path):
    saved(shared(), tmp_path, max_shard_size="20KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with pytest.raises(ConfigError, match="cannot load the model"):
        hub.load(tmp_path)


# Another process


def python(code: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess:
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=240, check=False
    )
    if check:
        assert result.returncode == 0, result.stderr[-3000:]
    return result


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A saved model of every family, half of them tied, and the logits each has to give."""
    root = tmp_path_factory.mktemp("models")
    for i, family in enumerate(FAMILIES):
        scheme = SIAMESE[i % 2]
        model = rewired(family, scheme, tie_word_embeddings=i < 2)
        saved(model, root / family)
        with torch.no_grad():
            save_file({"logits": model(input_ids=tokens()).logits, "ids": tokens()}, root / f"{family}.out.safetensors")
    return root


ORDERS = {
    "siamesenorm-first": "import siamesenorm, transformers",
    "transformers-first": "import transformers, siamesenorm",
    "class-first": "from transformers import LlamaForCausalLM, Qwen3Model, AutoModelForCausalLM; import siamesenorm",
    "config-class-first": "from transformers import LlamaConfig; import siamesenorm",
    "auto-table-after": "import siamesenorm, transformers.models.auto.modeling_auto",
}
LOAD = """
import sys, torch
torch.set_num_threads(1)
from pathlib import Path
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoConfig
for family in sys.argv[2:]:
    root = Path(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(root / family)
    wanted = load_file(root / f"{family}.out.safetensors")
    assert type(model).__module__ == "siamesenorm.hosts.classes", type(model)
    assert torch.equal(model(input_ids=wanted["ids"]).logits, wanted["logits"]), family
"""


@pytest.mark.parametrize("order", ORDERS)
def test_a_fresh_process_loads_it_whatever_is_imported_first(order, folders):
    families = FAMILIES if order == "siamesenorm-first" else FAMILIES[-1:]
    python(f"{ORDERS[order]}\n{LOAD}", folders, *families)


def test_a_fresh_process_that_wants_the_config_alone(folders):
    code = """
import sys
from transformers import AutoConfig
import siamesenorm
config = AutoConfig.from_pretrained(sys.argv[1])
print(type(config).__name__, config.residual_scheme["name"], config.num_hidden_layers)
"""
    assert python(code, folders / "qwen3").stdout.split() == ["ResidualQwen3Config", "siamese", "3"]


def test_without_the_package_nothing_loads(folders):
    code = """
import sys
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1])
print("loaded")
"""
    result = python(code, folders / "llama", check=False)
    assert result.returncode != 0
    assert "loaded" not in result.stdout
    assert "siamesenorm_llama" in result.stderr


def test_a_pickled_model_in_a_fresh_process(folders, tmp_path):
    import pickle

    model = transformers.AutoModelForCausalLM.from_pretrained(folders / "qwen3")
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(model))
    code = """
import pickle, sys
from safetensors.torch import load_file
import torch
torch.set_num_threads(1)
model, wanted = pickle.load(open(sys.argv[1], "rb")), load_file(sys.argv[2])
assert torch.equal(model(input_ids=wanted["ids"]).logits, wanted["logits"])
"""
    python(code, tmp_path / "model.pkl", folders / "qwen3.out.safetensors")


def test_importing_the_package_imports_neither_torch_nor_transformers():
    code = (
        "import sys, {}\nprint(sorted(m for m in ('torch', 'transformers', 'numpy', 'olmo_core') if m in sys.modules))"
    )
    assert python(code.format("siamesenorm")).stdout.strip() == "[]"
    assert "transformers" not in python(code.format("siamesenorm.residual")).stdout


def test_importing_the_package_costs_no_more_than_torch():
    code = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"

    def seconds(name):
        return min(float(python(code.format(name)).stdout) for _ in range(3))

    python("import torch")
    assert seconds("siamesenorm") <= 1.3 * seconds("torch")


def test_public_names_are_there():
    code = """
import siamesenorm
for name in siamesenorm.__all__:
    getattr(siamesenorm, name)
print(siamesenorm.schemes())
try:
    siamesenorm.rewrite
except AttributeError as error:
    print(error)
"""
    out = python(code).stdout
    assert "'siamese'" in out
    assert "no attribute 'rewrite'" in out
    assert PREFIX.keys() == {name for name in hosts.hosts() if hosts.get_host(name).head == "ForCausalLM"}
