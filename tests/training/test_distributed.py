"""Two processes against one: the same losses, the same bits after a resume, and no waiting for each other."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import siamesenorm
from siamesenorm.data import arrays
from siamesenorm.training.export import export
from siamesenorm.training.recipe_files import load
from siamesenorm.training.run import train
from siamesenorm.training.run_folder import read_metrics
from tests.training.test_run import assert_same, weights
from tests.training.tiny import Watcher, small_corpus, write_recipe

ROOT = Path(__file__).parents[2]
PLAIN = ["model.config.attention_dropout=0.0"]
MOE = ["model.host=olmoe", "model.config.num_experts=4", "model.config.num_experts_per_tok=2"]
TIED = ["model.config.tie_word_embeddings=true"]
OPENED = ["model.options={x: post, x_init: 0.0, y_eps: 1.0}", "schedule.own_steps=2", "schedule.open_steps=5"]

# What two processes do, and one is compared with.
EQUAL = {
    "fsdp-tied-checkpointed": [*TIED, "train.activation_checkpointing=true", "train.micro_batch_size=1"],
    "ddp-masked": ["train.parallel=ddp", "data.document_masking=true", "train.micro_batch_size=1"],
    "hsdp": ["train.parallel=hsdp", "train.shard_degree=1", "train.micro_batch_size=1"],
    "moe-fsdp-checkpointed": [*MOE, "train.activation_checkpointing=true", "train.micro_batch_size=1"],
    "moe-ddp-tied": [*MOE, *TIED, "train.parallel=ddp"],
}
MORE_EQUAL = {
    "pre": ["model.scheme=pre"],
    "ddp-tied": ["train.parallel=ddp", *TIED, "train.micro_batch_size=1"],
    "hsdp-of-one-machine": ["train.parallel=hsdp"],
    "moe-fsdp": MOE,
    "fsdp-opened": OPENED,
    "ddp-opened": ["train.parallel=ddp", *OPENED],
}
# Every scheme with its defaults, a residual warm-up among them, for two steps.
SHORT = [*PLAIN, "train.steps=2", "train.checkpoint_every=2", "train.validate_every=2", "sample.tokens=0"]
SCHEMES = {name: [*SHORT, f"model.scheme={name}", "model.options.warmup_steps=3"] for name in siamesenorm.schemes()}
BROKEN = {"dense": [], "moe-tied": [*MOE, *TIED]}
MORE_BROKEN = {"dense-tied-ddp": [*TIED, "train.parallel=ddp"], "moe": MOE}
AVERAGED = [*PLAIN, *TIED, "train.ema_decay=0.9"]
OTHERS = [
    {"overrides": PLAIN, "out": "two-then-one", "at": 3, "signal": "SIGINT", "on": 0},
    {"overrides": PLAIN, "out": "one-then-two"},
    {"overrides": ["train.precision=bfloat16", *PLAIN], "out": "two/bfloat16"},
    {"overrides": ["train.batch_size=3"], "out": "odd-batch"},
    {"overrides": ["train.parallel=hsdp", "train.shard_degree=3"], "out": "odd"},
    {"overrides": AVERAGED, "out": "resaved", "resave": True},
    {"overrides": ["optim.lr=1e36", "schedule.warmup_steps=0", "train.max_grad_norm=null"], "out": "diverged"},
]


def jobs(equal, broken):
    made = [{"overrides": [*PLAIN, *overrides], "out": f"two/{name}"} for name, overrides in equal.items()]
    for name, overrides in broken.items():
        made += [
            {"overrides": overrides, "out": f"unbroken/{name}"},
            # One process alone hears of the signal; a checkpoint is due at even steps, an epoch has four.
            {"overrides": overrides, "out": f"broken/{name}", "at": 3, "signal": "SIGTERM"},
            {"overrides": overrides, "out": f"broken/{name}"},
        ]
    return made


def slow(names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def torchrun(folder, *arguments, processes=2):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    write_recipe(folder)
    small_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    """Trains a run in this process, on the corpus that the others read."""
    prepare = arrays.prepare
    arrays.prepare = lambda source="python-stdlib": prepare(source, cache=folder / "cache", root=folder / "corpus")
    yield lambda out, *overrides: train(load(str(folder / "tiny.yaml"), overrides), folder / out, Watcher())
    arrays.prepare = prepare


def run_all(folder, todo):
    (folder / "jobs.json").write_text(json.dumps(todo))
    process = torchrun(folder, "-m", "tests.training.worker", folder)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    done = json.loads((folder / "results.json").read_text())
    return {job["out"]: result for job, result in zip(todo, done, strict=True)}


@pytest.fixture(scope="module")
def results(folder, alone):
    """All that two processes did, by folder."""
    assert train_until(folder, alone, 3).status == "interrupted"
    assert alone("saved", *AVERAGED).status == "finished"
    shutil.copytree(folder / "saved", folder / "resaved")
    (folder / "resaved" / "summary.json").unlink()
    return run_all(folder, [*jobs(EQUAL, BROKEN), *OTHERS])


@pytest.fixture(scope="module")
def more_results(folder, alone):
    """What they do beyond the default tests."""
    return run_all(folder, jobs(MORE_EQUAL, MORE_BROKEN))


@pytest.fixture(scope="module")
def scheme_results(folder, alone):
    """Two steps of every scheme."""
    todo = [{"overrides": overrides, "out": f"schemes/{name}"} for name, overrides in SCHEMES.items()]
    return run_all(folder, todo)


@pytest.fixture
def result_of(request):
    """The result of a run by its folder; starts the runs that it is among."""

    def find(out):
        name = out.split("/")[-1]
        more = name in MORE_EQUAL or name in MORE_BROKEN
        return request.getfixturevalue("more_results" if more else "results")[out]

    return find


def train_until(folder, alone, at):
    watcher = Watcher(at, lambda: signal.raise_signal(signal.SIGTERM))
    return train(load(str(folder / "tiny.yaml"), PLAIN), folder / "one-then-two", watcher)


def losses(run):
    return [line["loss"] for line in read_metrics(run / "metrics.jsonl")]


@pytest.mark.parametrize("name", [*EQUAL, *slow(MORE_EQUAL)])
def test_two_processes_compute_what_one_does(name, folder, result_of, alone):
    run = folder / "two" / name
    result = result_of(f"two/{name}")
    assert result["statuses"] == ["finished", "finished"]
    overrides = [each for each in (EQUAL | MORE_EQUAL)[name] if "parallel" not in each and "degree" not in each]
    expected = alone(f"one/{name}", *PLAIN, *overrides).summary
    summary = result["summary"]
    assert losses(run) == pytest.approx(losses(folder / "one" / name), abs=1e-5)
    assert len(losses(run)) == 7
    assert summary["val_loss"] == pytest.approx(expected["val_loss"], abs=1e-5)
    assert (summary["params"], summary["processes"]) == (expected["params"], 2)
    ours, theirs = weights(run), weights(folder / "one" / name)
    assert ours.keys() == theirs.keys()
    for key, weight in ours.items():
        torch.testing.assert_close(weight, theirs[key], rtol=1e-4, atol=1e-5)
    if name.startswith("moe"):
        ours, theirs = (
            [line["router_loss"] for line in read_metrics(folder / d / name / "metrics.jsonl")] for d in ("two", "one")
        )
        assert ours == pytest.approx(theirs, abs=1e-5)
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    assert sum(p.numel() for p in model.parameters()) == summary["params"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_takes_two_steps_on_two_processes_as_on_one(name, folder, scheme_results, alone):
    assert scheme_results[f"schemes/{name}"]["statuses"] == ["finished", "finished"]
    expected = alone(f"schemes-alone/{name}", *SCHEMES[name]).summary
    assert losses(folder / "schemes" / name) == pytest.approx(losses(folder / "schemes-alone" / name), abs=1e-5)
    assert scheme_results[f"schemes/{name}"]["summary"]["val_loss"] == pytest.approx(expected["val_loss"], abs=1e-5)


@pytest.mark.parametrize("name", [*BROKEN, *slow(MORE_BROKEN)])
def test_a_signal_to_one_of_two_is_saved_and_resumed_bit_for_bit(name, folder, result_of):
    assert result_of(f"broken/{name}")["begun"] == [3]
    assert_same(folder / "broken" / name, folder / "unbroken" / name)


def test_two_then_one_and_one_then_two(folder, results, alone):
    unbroken = alone("one-alone", *PLAIN)
    assert results["two-then-one"]["statuses"] == ["interrupted", "interrupted"]
    assert alone("two-then-one", *PLAIN).status == "finished"
    assert results["one-then-two"]["begun"] == [3]
    for out in ("two-then-one", "one-then-two"):
        assert losses(folder / out) == pytest.approx(losses(folder / "one-alone"), abs=1e-5)
        summary = json.loads((folder / out / "summary.json").read_text())
        assert summary["val_loss"] == pytest.approx(unbroken.summary["val_loss"], abs=1e-5)


@pytest.mark.parametrize("raw", [False, True])
def test_one_and_two_processes_export_to_the_same_bytes(raw, folder, results, tmp_path):
    assert results["resaved"]["statuses"] == ["finished", "finished"]
    writers = {
        run: {path.name[:3] for path in (folder / run / "checkpoints" / "step7" / "model_and_optim").glob("*.distcp")}
        for run in ("saved", "resaved")
    }
    assert writers == {"saved": {"__0"}, "resaved": {"__0", "__1"}}
    for run in writers:
        export(folder / run, tmp_path / run, raw=raw)
    for path in (tmp_path / "saved").iterdir():
        if path.name != "README.md":
            assert (tmp_path / "resaved" / path.name).read_bytes() == path.read_bytes()
    at_the_end = (folder / "saved" / "model" / "model.safetensors").read_bytes()
    assert ((tmp_path / "resaved" / "model.safetensors").read_bytes() == at_the_end) is not raw


def test_bfloat16_in_parts_is_autocast_within_its_rounding(folder, results, alone):
    expected = alone("one/bfloat16", "train.precision=bfloat16", *PLAIN).summary
    assert results["two/bfloat16"]["summary"]["val_loss"] == pytest.approx(expected["val_loss"], abs=0.02)


def test_what_does_not_divide_is_refused(folder, results):
    assert results["odd"]["statuses"] == results["odd-batch"]["statuses"] == ["refused", "refused"]
    assert "train.batch_size (3) does not divide over 2 processes" in results["odd-batch"]["message"]
    assert "train.shard_degree (3) does not divide 2 processes" in results["odd"]["message"]
    assert not list(folder.glob("odd*"))


def test_all_stop_before_a_step_that_is_not_finite(folder, results):
    result = results["diverged"]
    assert result["statuses"] == ["diverged", "diverged"]
    assert "overflowed first in sublayer" in result["message"]
