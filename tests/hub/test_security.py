"""What a folder must not do to who loads it: run code, or take memory that its files do not account for."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import struct
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from siamesenorm import hub
from siamesenorm.convert import upcycle
from siamesenorm.data import byte_tokenizer
from siamesenorm.data import tokenizer as tokenizers
from siamesenorm.hub import checks
from siamesenorm.hub.loading import load_dit
from siamesenorm.residual import ConfigError
from siamesenorm.training.sampling import load_pipeline
from siamesenorm.training.saved import load_tokenizer
from tests.hosts import test_dit, test_vision
from tests.hosts.tiny import config, host, rewired, scatter, tokens

HUGE = 10**9


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def little_memory():
    """A gigabyte more than this process has: whoever wants much more fails."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture
def traps(tmp_path, monkeypatch):
    """Where this process looks for modules there are some that leave a mark when they are imported."""
    mark = tmp_path / "mark"
    code = f"import os\nos.mkdir({str(mark)!r})\nclass Evil: pass\n"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "evil.py").write_text(code)
    yield code
    assert not mark.exists()


def saved(folder, model=None):
    logging.disable_progress_bar()
    (model or rewired("llama", "post-pre")).save_pretrained(folder)
    return folder


def changed(folder, change, name="config.json"):
    written = json.loads((folder / name).read_text())
    change(written)
    (folder / name).write_text(json.dumps(written))
    return folder


def refused(load, folder, match):
    with pytest.raises(ConfigError, match=match) as error:
        load(folder)
    assert "\n" not in str(error.value)


# Code


def test_code_that_comes_with_a_model_is_not_run(traps, tmp_path):
    folder = saved(tmp_path / "model", host())
    for name in ("modeling_evil", "configuration_evil", "tokenization_evil"):
        (folder / f"{name}.py").write_text(traps)
    maps = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    changed(folder, lambda written: written.update(auto_map=maps))
    # A family that is known is loaded by its own code.
    assert type(hub.load(folder)) is transformers.LlamaForCausalLM
    changed(folder, lambda written: written.update(model_type="evil"))
    refused(hub.load, folder, "cannot load the model")
    refused(hub.read_config, folder, "cannot read the model")


def test_code_that_comes_with_a_tokeniser_is_not_run(traps, tmp_path):
    byte_tokenizer.build().save_pretrained(tmp_path / "own")
    (tmp_path / "own" / "tokenization_evil.py").write_text(traps)
    maps = {"AutoTokenizer": ["tokenization_evil.Evil", None]}
    changed(
        tmp_path / "own",
        lambda written: written.update(auto_map=maps, tokenizer_class="Evil"),
        "tokenizer_config.json",
    )
    for load in (load_tokenizer, lambda path: tokenizers.load(str(path))):
        # Whether it is loaded as a tokeniser of a known kind is up to transformers.
        with contextlib.suppress(ConfigError):
            load(tmp_path / "own")


def test_pickles_beside_or_in_place_of_safetensors_are_not_read(traps, tmp_path):
    folder = saved(tmp_path / "model", host())
    for name in ("pytorch_model.bin", "model.pkl", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps(Touch(tmp_path / "mark")))
    hub.load(folder)
    (folder / "model.safetensors").unlink()
    refused(hub.load, folder, "holds no weights")


@pytest.mark.parametrize("value", ["evil/attention", "kernels-community/flash-attn", {"": "evil/attention@main"}])
def test_attention_from_the_hub_is_refused(value, tmp_path):
    folder = changed(saved(tmp_path), lambda written: written.update(attn_implementation=value))
    refused(hub.load, folder, "asks for attention by")
    folder = changed(folder, lambda written: written.update(attn_implementation="eager"))
    assert hub.load(folder)(input_ids=tokens()).logits.shape == (2, 13, 97)


def test_quantised_weights_are_refused(tmp_path):
    folder = saved(tmp_path, host())
    changed(folder, lambda written: written.update(quantization_config={"quant_method": "evil"}))
    refused(hub.load, folder, "it is quantised")


def pipeline(folder):
    from diffusers import DDIMScheduler, DiTPipeline

    from siamesenorm.hub.pixels import PixelAutoencoder

    DiTPipeline(test_dit.new(in_channels=3, out_channels=3), PixelAutoencoder(), DDIMScheduler()).save_pretrained(
        folder
    )
    return folder


def test_a_pipeline_runs_no_module_that_it_names(traps, tmp_path):
    folder = pipeline(tmp_path / "pipeline")
    load_pipeline(folder)
    for part in ("vae", "transformer", "scheduler"):
        kept = (folder / "model_index.json").read_text()
        changed(folder, lambda written, part=part: written.update({part: ["evil", "Evil"]}), "model_index.json")
        refused(load_pipeline, folder, f"its part {part} is of module 'evil', which would be run")
        (folder / "model_index.json").write_text(kept)
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    (folder / "transformer" / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Touch(tmp_path / "mark")))
    refused(load_pipeline, folder, "cannot load the diffusion model")


# Memory


def entry(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


LIES = {
    "a header longer than any": ({}, 1 << 62),
    "a header longer than the file": ({"a": entry([4], 0, 16)}, 1 << 20),
    "a tensor beyond the end": ({"a": entry([HUGE], 0, 4 * HUGE)}, None),
    "a shape that is not its bytes": ({"a": entry([HUGE], 0, 16)}, None),
    "a shape beyond counting": ({"a": entry([1 << 33, 1 << 33], 0, 16)}, None),
    "tensors over each other": ({"a": entry([4], 0, 16), "b": entry([4], 0, 16)}, None),
    "a hole": ({"a": entry([2], 8, 16)}, None),
    "a type that there is none of": ({"a": entry([4], 0, 16, "Q7")}, None),
    "a list": ([1, 2], None),
    "nothing": ({}, None),
}


def write_lie(path, lie):
    header, length = LIES[lie]
    content = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content) if length is None else length) + content + bytes(16))
    return path


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies(lie, tmp_path, little_memory):
    refused(checks.header, write_lie(tmp_path / "x.safetensors", lie), "no whole safetensors file")


@pytest.mark.parametrize("lie", ["a tensor beyond the end", "a shape that is not its bytes"])
def test_a_model_whose_header_lies(lie, tmp_path, little_memory):
    write_lie(saved(tmp_path) / "model.safetensors", lie)
    refused(hub.load, tmp_path, "cannot load .*no whole safetensors file")


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "head_dim"])
def test_a_config_with_a_huge_dimension(key, tmp_path, little_memory):
    for size in (HUGE, 10**30):
        folder = changed(saved(tmp_path), lambda written, size=size: written.update({key: size}))
        refused(hub.load, folder, "cannot load the model in")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_who_loads_a_rewired_model_by_transformers_is_told_too(family, tmp_path, little_memory):
    folder = changed(
        saved(tmp_path, rewired(family, "post-pre")), lambda written: written.update(num_hidden_layers=HUGE)
    )
    loaders = (transformers.AutoConfig, transformers.AutoModel, transformers.AutoModelForCausalLM)
    for loader in (*loaders, type(rewired(family, "post-pre"))):
        refused(loader.from_pretrained, folder, "num_hidden_layers=1,000,000,000, which its weights have not")


def test_a_config_with_huge_numbers_of_other_kinds(tmp_path, little_memory):
    def experts(written):
        (key,) = {"num_experts", "num_local_experts"} & written.keys()
        written[key] = HUGE

    refused(hub.load, changed(saved(tmp_path / "experts", host("qwen3_moe")), experts), "its config asks for")
    images = saved(tmp_path / "images", test_vision.host())

    def labels(written):
        del written["id2label"], written["label2id"]
        written["num_labels"] = HUGE

    refused(hub.load, changed(images, labels), "num_labels=1,000,000,000")
    names = {str(index): str(index) for index in range(10)}
    refused(hub.load, changed(images, lambda written: written.update(id2label=names, image_size=HUGE)), "cannot load")
    # Rotary positions are computed, so a config may promise as many as it likes.
    text = saved(tmp_path / "text")
    changed(text, lambda written: written.update(max_position_embeddings=HUGE))
    assert hub.load(text)(input_ids=tokens()).logits.shape == (2, 13, 97)


def test_a_huge_config_alone_is_refused_before_it_is_expanded(tmp_path, little_memory):
    folder = saved(tmp_path, host("qwen2"))
    (folder / "model.safetensors").unlink()
    changed(folder, lambda written: written.update(num_hidden_layers=HUGE, layer_types=None))
    refused(hub.read_config, folder, "num_hidden_layers=1,000,000,000")


@pytest.mark.parametrize("key", ["num_layers", "attention_head_dim", "sample_size", "num_embeds_ada_norm"])
def test_a_dit_with_a_huge_dimension(key, tmp_path, little_memory):
    for model in (test_dit.stock(), test_dit.new()):
        folder = changed(saved(tmp_path, model), lambda written: written.update({key: HUGE}))
        refused(load_dit, folder, "cannot load the model in")
        (folder / "diffusion_pytorch_model.safetensors").unlink()


def test_a_pipeline_with_a_huge_dimension(tmp_path, little_memory):
    folder = pipeline(tmp_path)
    changed(folder / "transformer", lambda written: written.update(num_layers=HUGE))
    refused(load_pipeline, folder, "num_layers=1,000,000,000")


def test_a_scheduler_with_more_steps_than_any(tmp_path, little_memory):
    folder = pipeline(tmp_path)
    for steps in (HUGE, "many"):
        given = {"num_train_timesteps": steps}
        changed(folder / "scheduler", lambda written, given=given: written.update(given), "scheduler_config.json")
        refused(load_pipeline, folder, f"its scheduler has {steps!r} time steps")


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ({"model_type": "gpt_neo", "attention_types": [[["global", "local"], HUGE]]}, "attention_types"),
        ({"model_type": "stablelm", "num_attention_heads": HUGE, "qk_layernorm": True}, "num_attention_heads"),
        ({"model_type": "git", "num_image_with_embedding": HUGE}, "num_image_with_embedding"),
        ({"model_type": "llama", "num_labels": HUGE}, "num_labels"),
    ],
)
def test_what_a_config_multiplies_in_places_of_its_own(written, key, tmp_path, little_memory):
    folder = saved(tmp_path)
    # A tensor without numbers can say that it is as large.
    save_file({"empty": torch.zeros(0, HUGE)}, folder / "more.safetensors")
    (folder / "config.json").write_text(json.dumps(written))
    for load in (hub.load, hub.read_config):
        refused(load, folder, f"its config has {key}=1,000,000,000, which its weights have not")


def test_an_index_names_safetensors_alone(tmp_path, traps):
    folder = saved(tmp_path)
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    (folder / "w.bin").write_bytes(pickle.dumps(Touch(tmp_path / "mark")))
    index = {"weight_map": dict.fromkeys(names, "w.bin")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(hub.load, folder, "names 'w.bin', which is no safetensors file")


def test_a_config_that_names_the_file_of_its_weights(tmp_path):
    folder = changed(
        saved(tmp_path), lambda written: written.update(transformers_weights="sub/x.safetensors.index.json")
    )
    refused(hub.load, folder, "names the file of its weights, which may be anywhere")


def test_pipes_and_files_without_end(tmp_path, little_memory):
    folder = saved(tmp_path)
    with (folder / "generation_config.json").open("wb") as file:
        file.truncate(4 << 30)
    refused(hub.load, folder, "no such file's")
    (folder / "generation_config.json").unlink()
    with (folder / "chat_template.jinja").open("wb") as file:
        file.truncate(4 << 30)
    refused(checks.check_tokenizer, folder, "it has 4,294,967,296 bytes")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    refused(hub.load, folder, "is no file")


def test_an_adapter_in_a_models_folder(tmp_path, little_memory):
    folder = saved(tmp_path)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": HUGE}))
    refused(hub.load, folder, "it has an adapter of PEFT")


def test_files_that_are_too_large_to_be_what_they_are_called(tmp_path, little_memory):
    folder = saved(tmp_path)
    byte_tokenizer.build().save_pretrained(folder)
    for name, load, match in (
        ("config.json", hub.load, "more than 16,777,216 bytes are no such file's"),
        ("tokenizer.json", load_tokenizer, "no tokeniser's file"),
    ):
        with (folder / name).open("r+b") as file:
            file.truncate(1 << 33)
        refused(load, folder, match)


def test_json_that_no_reader_takes(tmp_path, little_memory):
    folder = saved(tmp_path)
    for content in (f'{{"hidden_size": {"9" * 5000}}}', "[" * 100_000, '{"a": "\xff"}'.encode("latin-1"), "\0" * 9):
        (folder / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
        refused(hub.load, folder, "cannot read")


# Paths


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/outside.safetensors", "sub/model.safetensors"])
def test_an_index_that_points_elsewhere(name, tmp_path):
    folder = tmp_path / "model"
    rewired("llama", "post-pre").save_pretrained(folder, max_shard_size="20KB")
    (tmp_path / "outside.safetensors").write_bytes(next(folder.glob("*.safetensors")).read_bytes())

    def point(written):
        first = next(iter(written["weight_map"]))
        written["weight_map"][first] = name

    changed(folder, point, "model.safetensors.index.json")
    refused(hub.load, folder, "names a file elsewhere")


def test_an_index_that_is_none(tmp_path):
    folder = saved(tmp_path)
    for content in ("[]", "{}", '{"weight_map": 3}', "{"):
        (folder / "model.safetensors.index.json").write_text(content)
        refused(hub.load, folder, "maps no weights|cannot read")


# Files of the wrong kind


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", ["pickle", "safetensors", "list", "text", "empty"])
def test_a_tokeniser_file_of_the_wrong_kind(name, kind, tmp_path, little_memory):
    byte_tokenizer.build().save_pretrained(tmp_path)
    content = {
        "pickle": pickle.dumps(Touch(tmp_path / "mark")),
        "safetensors": struct.pack("<Q", 2) + b"{}",
        "list": b"[1, 2]",
        "text": b"#version: 0.2",
        "empty": b"",
    }[kind]
    (tmp_path / name).write_bytes(content)
    for load in (load_tokenizer, lambda path: tokenizers.load(str(path))):
        refused(load, tmp_path, "no tokeniser's file: it holds no JSON object")
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("content", ["{}", '{"model": {"type": "Evil"}}', '{"version": "1.0", "model": null}', "{"])
def test_json_that_is_no_tokeniser(content, tmp_path):
    byte_tokenizer.build().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    for load in (load_tokenizer, lambda path: tokenizers.load(str(path))):
        refused(load, tmp_path, "tokeniser")


def test_a_tokeniser_that_numbers_its_tokens_out_of_reach(tmp_path):
    byte_tokenizer.build().save_pretrained(tmp_path)

    def number(written):
        vocabulary = written["model"]["vocab"]
        vocabulary[next(iter(vocabulary))] = 4_000_000_000

    changed(tmp_path, number, "tokenizer.json")
    with pytest.raises(ConfigError, match="numbers them up to 4,000,000,000"):
        tokenizers.vocabulary(tokenizers.load(str(tmp_path)))


# What is right is let through


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_what_a_model_lacks_is_still_named(family, tmp_path):
    """A check of the size does not get in the way of an error that says more."""
    folder = saved(tmp_path, upcycle(scatter(host(family))))
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("norm_x.weight"))
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    refused(hub.load, folder, f"missing keys.*{name}")


def test_a_plain_config_of_every_size_that_is_known_is_let_through():
    for changes in ({}, {"max_window_layers": 28}, {"num_hidden_layers": 999}):
        checks.check_config({**config("qwen2").to_dict(), **changes}, None, "a test")
    with pytest.raises(ConfigError, match="layers_per_block"):
        checks.check_config({"inner": [{"layers_per_block": [2, HUGE]}]}, checks.Weights({}), "a test")
