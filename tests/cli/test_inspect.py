"""What ``siamesenorm inspect`` shows, and on how much room."""

import json
import subprocess
import sys

import pytest

from siamesenorm.cli.inspect import _grouped, _torchrun
from tests.cli.test_commands import refused, run

__all__ = ["run"]


def facts(run, *arguments):
    code, out, _ = run("inspect", *arguments, "--json")
    assert code == 0
    return json.loads(out)


def test_a_recipe_whose_data_is_not_there_is_inspected(run):
    found = facts(run, "lm-1.3b", "model.config.num_hidden_layers=2", "data.sequence_length=128")
    assert found["params"] > 2e8
    assert found["params_active"] == found["params"]
    assert found["experts"] is None
    refused(run("train", "lm-1.3b"), "data/fineweb-edu", "siamesenorm data prepare")


def test_memory_is_shared_between_processes(run):
    alone = facts(run, run.recipe)
    assert (alone["ranks"], alone["memory"]["parallel"]) == (1, "none")
    memory = alone["memory"]
    parts = [memory[part] for part in ("parameters", "gradients", "optimizer", "activations")]
    assert sum(parts) == memory["total"]
    assert parts[:3] == [4 * alone["params"], 4 * alone["params"], 8 * alone["params"]]
    shared = facts(run, run.recipe, "--ranks", "2")
    assert (shared["ranks"], shared["memory"]["parallel"]) == (2, "fsdp")
    # What does not divide evenly is filled up.
    assert shared["memory"]["parameters"] == pytest.approx(2 * alone["params"], rel=0.05)
    refused(run("inspect", run.recipe, "--ranks", "3"), "train.batch_size (4) does not divide over 3 processes")


def test_a_mixture_is_described(run):
    small = ["model.config.num_hidden_layers=2", "model.config.hidden_size=32", "train.micro_batch_size=1"]
    found = facts(run, "moe-tiny", *small)
    assert found["experts"] == {"active": 2, "total": 8}
    assert found["params_active"] < found["params"]
    _, out, _ = run("inspect", "moe-tiny", *small)
    assert "active, with 2 of 8 experts" in out


@pytest.mark.parametrize(
    ("ranks", "where"),
    [
        (1, "--standalone --nproc-per-node 1"),
        (8, "--standalone --nproc-per-node 8"),
        (12, "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --nproc-per-node 6"),
        (64, "--nnodes 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --nproc-per-node 8"),
    ],
)
def test_the_command_for_several_processes(ranks, where):
    command = _torchrun(("lm-tiny", "sample.prompt=a b"), ranks)
    assert command == f"torchrun {where} -m siamesenorm train lm-tiny 'sample.prompt=a b'"


def test_the_command_starts_what_was_inspected(run):
    command = facts(run, run.recipe, "seed=3")["torchrun"]
    assert command.endswith(f"-m siamesenorm train {run.recipe} seed=3")


def test_deep_models_fit_on_a_screen(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    deep = ["model.config.num_hidden_layers=20", "model.options.x=hybrid"]
    code, out, _ = run("inspect", run.recipe, *deep)
    assert code == 0
    *table, command = out.splitlines()
    assert len(table) < 35
    assert all(len(line.rstrip()) <= 80 for line in table)
    assert any(line.startswith("0-19") and "0.707…0.158" in line for line in table)
    assert command.startswith("torchrun ")
    assert len(facts(run, run.recipe, *deep)["sites"]) == 41


def test_blocks_that_differ_are_rows_of_their_own(run):
    sites = facts(run, run.recipe, "model.config.num_hidden_layers=4", "model.options.first_block_pre=true")["sites"]
    assert [row["block"] for row in _grouped(sites)] == ["0", "0", "1-3", "1-3", ""]


def test_a_run_is_inspected_like_its_recipe(run):
    assert run("train", run.recipe, "train.steps=1", "schedule.warmup_steps=0", "--out", "run")[0] == 0
    recipe, finished = facts(run, run.recipe), facts(run, "run")
    assert finished["memory"] == recipe["memory"]
    assert finished["torchrun"].endswith("train run/config.yaml")
    model = facts(run, "run/model")
    assert (model["params"], model["memory"], model["torchrun"]) == (recipe["params"], None, None)


@pytest.mark.slow
def test_the_largest_recipe_takes_little_time_and_memory():
    """Under a minute on an idle core, and far from what its weights would take."""
    code = (
        "import resource, sys; from siamesenorm.cli import main\n"
        "try: main(['inspect', 'moe-15b-a2b', '--ranks', '16', '--json'])\n"
        "except SystemExit: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(done.stdout)
    assert found["params"] == pytest.approx(15.1e9, rel=0.01)
    assert found["params_active"] == pytest.approx(1.97e9, rel=0.01)
    assert 0 < found["over_pre"]["flops_percent"] < 0.1
    assert int(done.stderr.split()[-1]) * 1024 < 3 * 2**30
