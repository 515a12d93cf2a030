"""The commands of the documents at a size that a test has time for: the same recipes with smaller numbers in them.

`install` changes this process, and so every fork of it: the package's recipes are read from a folder where each has its
own name and values but for the sizes in `SIZES`, the corpus is a few files of the standard library, a study has two
values on an axis, one seed and workers that are forked, a benchmark takes one round, and figures are coarse. Nothing of
what a command does or writes is left out.
"""

from __future__ import annotations

import json
import shutil
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from siamesenorm.study import Study

ROOT = Path(__file__).parents[2]
_TEXT = {
    "model": {
        "config": {
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
            "num_key_value_heads": 2, "max_position_embeddings": 64,
        },
    },
    "data": {"sequence_length": 32, "validation_sequences": 4},
    "sample": {"tokens": 8},
}  # fmt: skip
_EXPERTS = {"model": {"config": {"num_experts": 4, "num_experts_per_tok": 2}}}
_IMAGES = {"data": {"validation_images": 40}}
SIZES: dict[str, dict[str, Any]] = {
    "causal-lm": _TEXT,
    "image-classification": {
        **_IMAGES,
        "model": {
            "config": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        },
    },
    "class-conditional-diffusion": {
        **_IMAGES,
        "model": {"config": {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}},
        "sample": {"steps": 4, "guidance": [1.0, 2.0], "per_class": 1, "distance_images": 0},
    },
}
_TRAIN = {
    "schedule": {"warmup_steps": 1},
    "train": {"steps": 4, "micro_batch_size": None, "validate_every": 2, "checkpoint_every": 2},
}
# The name decides who is held out: operator.py and runpy.py are.
_FILES = ("abc.py", "bisect.py", "heapq.py", "keyword.py", "operator.py", "runpy.py", "sched.py", "stat.py")

_TEXTS = ("argparse.py", "ast.py", "copy.py", "dataclasses.py", "shutil.py", "tarfile.py")


def recipes(folder: Path) -> None:
    """Every recipe of the package, in small."""
    from siamesenorm.training import recipe_files

    folder.mkdir(parents=True)
    for name in recipe_files.packaged_names():
        tree = recipe_files._extended(recipe_files.find(name))
        sizes = SIZES[tree.get("task", "causal-lm")]
        for change in (sizes, _TRAIN, _EXPERTS if tree["model"]["host"] == "olmoe" else {}):
            tree = recipe_files._merged(tree, change)
        # Those of large recipes are asked for on many processes.
        tree["train"]["batch_size"] = 32 if tree["train"]["batch_size"] > 64 else 4
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(tree))


def smaller(study: Study) -> Study:
    """A study of the first two values on each axis, and of one seed."""
    return replace(study, axes={word: values[: 1 if word == "seeds" else 2] for word, values in study.axes.items()})


def corpus(folder: Path) -> None:
    """A few files of the standard library, of which one at least is held out and one is not."""
    folder.mkdir(parents=True)
    for name in _FILES:
        shutil.copy(Path(sysconfig.get_paths()["stdlib"]) / name, folder / name)


def own_files(folder: Path) -> None:
    """What the documents speak of as the reader's own: a checkout of the project, and text."""
    for name in ("benchmarks", "examples", "recipes"):
        (folder / name).symlink_to(ROOT / name)
    texts = [(Path(sysconfig.get_paths()["stdlib"]) / name).read_text() for name in _TEXTS]
    documents = [part for text in texts for part in text.split("\n\n") if part.strip()]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))


def install(folder: Path) -> None:
    """Make this process, and its forks, work at the small size.

    Args:
        folder: for recipes, corpus and caches.
    """
    from matplotlib.figure import Figure

    import siamesenorm.bench
    from siamesenorm.data import arrays
    from siamesenorm.study import session
    from siamesenorm.training import recipe_files

    recipes(folder / "recipes")
    corpus(folder / "corpus")
    packaged = recipe_files.packaged_folder
    recipe_files.packaged_folder = lambda kind="recipe": folder / "recipes" if kind == "recipe" else packaged(kind)
    prepare = arrays.prepare
    arrays.prepare = lambda source="python-stdlib", **options: prepare(
        source, **{"cache": folder / "cache", "root": folder / "corpus", **options}
    )
    run_study = session.run_study
    session.run_study = lambda study, out, **options: run_study(smaller(study), out, **options, start="fork")
    savefig = Figure.savefig

    def coarsely(figure: Figure, *arguments: Any, **options: Any) -> None:
        figure.set_layout_engine("none")
        savefig(figure, *arguments, **{**options, "dpi": 30})

    Figure.savefig = coarsely
    bench, of_shape = siamesenorm.bench.bench, siamesenorm.bench.of_shape
    siamesenorm.bench.bench = lambda *arguments, **options: bench(*arguments, **{**options, "rounds": 1})
    siamesenorm.bench.of_shape = lambda name, tokens: None if of_shape(name, tokens) is None else of_shape("2x64", 64)
