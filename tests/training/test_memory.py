"""The memory of a training step: against torch's own tracker, and against what a process really grows by."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.distributed._tools.mem_tracker import MemTracker

from siamesenorm.training.build import build_model, check
from siamesenorm.training.evaluate import summed_loss
from siamesenorm.training.memory import per_machine, training_memory
from siamesenorm.training.recipe_files import load

ROOT = Path(__file__).parents[2]

# 25 million parameters, and activations as large as all that belongs to them.
RECIPE = {
    "name": "measured",
    "model": {
        "host": "llama",
        "scheme": "siamese",
        "options": {"x": "hybrid"},
        "config": {
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "max_position_embeddings": 512,
            "tie_word_embeddings": False,
        },
    },
    "data": {"sequence_length": 512, "validation_sequences": 4},
    "optim": {"lr": 1e-3},
    "schedule": {"warmup_steps": 0},
    "train": {"steps": 3, "batch_size": 4, "micro_batch_size": 2, "checkpoint_every": 1000, "device": "cpu"},
    "sample": {"prompt": "a", "tokens": 1},
}
MIXTURE = {
    "extends": "dense.yaml",
    "model": {"host": "olmoe", "config": {"intermediate_size": 512, "num_experts": 8, "num_experts_per_tok": 2}},
}


@pytest.fixture
def recipes(tmp_path):
    (tmp_path / "dense.yaml").write_text(yaml.safe_dump(RECIPE))
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(MIXTURE))
    return tmp_path


def memory(recipe, ranks=1):
    return training_memory(check(recipe), recipe, ranks)


def small(*overrides, name="moe-tiny"):
    return load(name, ["model.config.num_hidden_layers=2", "data.sequence_length=64", *overrides])


def tracked(recipe):
    """The most that torch's tracker sees in two steps of a real training."""
    model = build_model(recipe)
    if recipe.train.activation_checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.train().parameters(), fused=True)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    share = recipe.train.micro_batch_size or recipe.train.batch_size
    with tracker:
        for _ in range(2):
            for _ in range(recipe.train.batch_size // share):
                tracker.reset_mod_stats()
                ids = torch.randint(0, 256, (share, recipe.data.sequence_length))
                with torch.autocast("cpu", torch.bfloat16, enabled=recipe.train.precision == "bfloat16"):
                    # Not kept for longer than the loss needs them, as training does.
                    loss = summed_loss(model(input_ids=ids, use_cache=False).logits, ids)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@pytest.mark.parametrize("checkpointing", ["false", "true"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("micro", [1, 4])
def test_it_is_what_torch_tracks_in_a_real_step(precision, checkpointing, micro):
    recipe = small(
        f"train.precision={precision}",
        f"train.activation_checkpointing={checkpointing}",
        f"train.micro_batch_size={micro}",
        name="lm-tiny",
    )
    assert memory(recipe).total == pytest.approx(tracked(recipe), rel=0.01)


@pytest.mark.parametrize("host", ["olmoe", "mixtral", "qwen3_moe"])
def test_every_mixture_can_be_measured(host):
    found = memory(small(f"model.host={host}", "train.precision=bfloat16"))
    assert found.total == found.parameters + found.gradients + found.optimizer + found.activations
    assert found.activations > 0


def test_it_follows_the_recipe():
    alone = memory(small())
    assert alone.optimizer == 2 * alone.gradients == 2 * alone.parameters
    assert memory(small("train.micro_batch_size=1")).activations < alone.activations
    assert memory(small("train.activation_checkpointing=true")).activations < alone.activations
    assert memory(small("data.document_masking=true")).activations > alone.activations
    # The table of tokens and the head are one then.
    tied = memory(small("model.config.tie_word_embeddings=true"))
    assert alone.parameters - tied.parameters == 4 * 258 * 128


@pytest.mark.parametrize(
    ("parallel", "ranks", "degree"), [("fsdp", 4, 4), ("auto", 4, 4), ("hsdp", 4, 2), ("hsdp", 4, 4), ("ddp", 2, 1)]
)
def test_processes_hold_their_part(parallel, ranks, degree):
    more = [f"train.shard_degree={degree}"] if parallel == "hsdp" else []
    alone, found = memory(small()), memory(small(f"train.parallel={parallel}", *more), ranks)
    assert found.parameters == pytest.approx(alone.parameters / degree, rel=0.01)
    assert found.optimizer == pytest.approx(alone.optimizer / degree, rel=0.01)
    assert found.gradients == pytest.approx(alone.gradients / degree * (2 if parallel == "ddp" else 1), rel=0.01)
    assert not dist.is_initialized()


def test_machines_are_alike():
    assert [per_machine(ranks) for ranks in (1, 2, 8, 12, 13, 64)] == [1, 2, 8, 6, 1, 8]


CASES = [
    ("dense", 1, []),
    ("dense", 1, ["train.activation_checkpointing=true"]),
    ("dense", 1, ["train.precision=bfloat16"]),
    ("dense", 1, ["train.precision=bfloat16", "train.activation_checkpointing=true"]),
    ("mixture", 1, []),
    ("mixture", 1, ["train.precision=bfloat16"]),
    ("mixture", 1, ["train.precision=bfloat16", "train.activation_checkpointing=true"]),
    ("dense", 2, ["train.batch_size=8"]),
    ("dense", 2, ["train.batch_size=8", "train.precision=bfloat16"]),
    ("dense", 2, ["train.batch_size=8", "train.precision=bfloat16", "train.parallel=ddp"]),
    # In bfloat16 the processor's library keeps code for every number of tokens that an expert was given.
    ("mixture", 2, ["train.batch_size=8"]),
]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells what a process took at most")
@pytest.mark.parametrize(("name", "ranks", "overrides"), CASES)
def test_it_is_what_a_run_takes(recipes, name, ranks, overrides):
    path = str(recipes / f"{name}.yaml")
    start = ["-m"] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [sys.executable, *start, "tests.training.measured", str(recipes), path, *overrides]
    # Every large tensor in pages of its own, which go back to the system when it is freed.
    pages = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "1"}
    paths = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **pages, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    real = int(next(line for line in done.stdout.splitlines() if line.startswith("grew by")).split()[-1])
    estimate = memory(load(path, overrides), ranks).total
    print(f"{name} {ranks} {overrides}: {estimate / real - 1:+.1%} of {real / 2**20:.0f} MiB")
    assert estimate == pytest.approx(real, rel=0.1)
