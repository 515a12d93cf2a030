"""The command line as a process of its own: start-up time, signals, sudden ends."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.training.tiny import TREE

COMMANDS = ["train", "eval", "generate", "sample", "inspect", "study", "probe", "bench", "data"]


def environment(tmp_path):
    return {**os.environ, "OMP_NUM_THREADS": "1", "SIAMESENORM_CACHE": str(tmp_path / "cache"), "COLUMNS": "120"}


def command(*arguments):
    return [sys.executable, "-m", "siamesenorm", *map(str, arguments)]


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_answers_within_half_a_second(tmp_path, arguments):
    # Of the processor's time, the least of three: what else the machine does must not decide.
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            command(*arguments), capture_output=True, text=True, env=environment(tmp_path), check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(times) < 0.5
    assert "Usage" in done.stdout
    if arguments == ["--help"]:
        assert all(name in done.stdout for name in COMMANDS)


def test_help_imports_nothing_heavy():
    heavy = "{'torch', 'transformers', 'olmo_core', 'numpy', 'matplotlib'}"
    code = (
        "import sys\nfrom siamesenorm.cli import main\n"
        "try: main(['train', '--help'])\nexcept SystemExit: pass\n"
        f"assert not {heavy} & set(sys.modules), sorted({heavy} & set(sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_sigterm_saves_kill_does_not_and_the_same_command_goes_on(tmp_path):
    recipe = tmp_path / "tiny.yaml"
    train = {**TREE["train"], "steps": 100_000, "validate_every": 1_000_000, "checkpoint_every": 1_000_000}
    recipe.write_text(yaml.safe_dump({**TREE, "train": train}))
    arguments = command("train", recipe, "--out", tmp_path / "run", "--json")
    metrics = tmp_path / "run" / "metrics.jsonl"

    def start():
        return subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(tmp_path)
        )

    def wait_for_step(step):
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            if lines and json.loads(lines[-1])["step"] >= step:
                return
            time.sleep(0.2)
        raise AssertionError(f"step {step} was not reached")

    process = start()
    wait_for_step(2)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err
    assert "and saved; the same command goes on from there" in err
    (saved,) = (int(path.name[4:]) for path in (tmp_path / "run" / "checkpoints").glob("step*"))

    process = start()
    wait_for_step(saved + 2)
    process.kill()
    _, err = process.communicate(timeout=60)
    assert f"going on after step {saved}" in err
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()[: saved + 2]] == list(
        range(1, saved + 3)
    )
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step*")] == [f"step{saved}"]


def test_an_error_is_one_message_and_exit_code_2(tmp_path):
    done = subprocess.run(
        command("train", "lm-tinny"), capture_output=True, text=True, env=environment(tmp_path), cwd=tmp_path
    )
    assert done.returncode == 2
    assert done.stderr == "error: unknown recipe 'lm-tinny'; did you mean 'lm-tiny'?\n"
    assert done.stdout == ""
    assert list(Path(tmp_path).iterdir()) == []
