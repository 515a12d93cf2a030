"""Model cards: the ``README.md`` in a saved model's folder, as the Hugging Face hub reads and shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..data.files import write_whole
from ..hosts import scheme_from_dict
from ..hosts.families import all_hosts
from ..residual import ConfigError, Scheme, one_line
from .autoload import HEADS
from .loading import DENOISER, is_pipeline

__all__ = ["EVALUATION", "FILE", "add_results", "read", "result", "table", "write"]

FILE = "README.md"
EVALUATION = "Evaluation"
"""The heading of what `add_results` writes."""
_CITATION = "Citation"
_PROJECT = "siamesenorm"
_BIBTEX = """\
@inproceedings{siamesenorm,
  title = {SiameseNorm: Breaking the Barrier to Reconciling Pre/Post-Norm},
  author = {Li and others},
  booktitle = {International Conference on Machine Learning},
  year = {2026},
  note = {arXiv:2602.08064},
}"""
# What the hub calls a task, by the head of a model.
_TASKS = {"ForCausalLM": "text-generation", "ForImageClassification": "image-classification"}
_PIPELINE_TASK = "unconditional-image-generation"
# What turns text or images into a model's input.
_INPUTS = {
    "ForCausalLM": {"tokenizer": "AutoTokenizer"},
    "ForImageClassification": {"processor": "AutoImageProcessor"},
}


def write(
    folder: Path,
    title: str,
    about: str,
    sections: Mapping[str, str],
    results: Sequence[Any] = (),
    base_model: str | None = None,
) -> None:
    """Write the card of the model saved in ``folder``.

    How to load it, its residual scheme with all options and what to cite are found in its configuration.

    Args:
        folder: of the saved model, or of a pipeline of diffusers.
        title: in the first line.
        about: the first paragraph.
        sections: the text of further ones by heading, in order.
        results: made by `result`, for the hub.
        base_model: of a model that was trained on from another, its name.

    Raises:
        ConfigError: the folder holds no saved model.
    """
    from huggingface_hub import ModelCardData

    pipeline, config = _config(folder)
    scheme = None if config.get("residual_scheme") is None else scheme_from_dict(config["residual_scheme"])
    head = _head(config)
    data = ModelCardData(
        library_name="diffusers" if pipeline else "transformers",
        pipeline_tag=_PIPELINE_TASK if pipeline else _TASKS.get(head),
        tags=[_PROJECT, *([] if scheme is None else [f"residual-scheme:{scheme.name}"])],
        base_model=base_model,
        model_name=title,
        eval_results=list(results) or None,
    )
    body = {
        "How to load it": _loading(folder, pipeline, head, rewired=scheme is not None),
        **({} if scheme is None else {"Residual scheme": _scheme(scheme)}),
        **sections,
        _CITATION: _citation(scheme),
    }
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {title}",
        about,
        *(f"## {name}\n\n{text}" for name, text in body.items()),
    ]
    write_whole(folder / FILE, "\n\n".join(part for part in parts if part) + "\n")


def read(folder: Path) -> Any:
    """The card of a saved model, as huggingface_hub's ``ModelCard``; ``None`` where it has none.

    Raises:
        ConfigError: it cannot be read.
    """
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    path = folder / FILE
    if not path.is_file():
        return None
    try:
        return ModelCard(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, YAMLError) as error:
        raise ConfigError(f"cannot read the model card {path}: {one_line(error)}") from error


def add_results(folder: Path, text: str, results: Sequence[Any]) -> None:
    """Put the results of an evaluation into a card, in the place of those that it had; write one where there is none.

    Args:
        folder: of the saved model.
        text: of the section.
        results: made by `result`; those that the card has of other tasks stay.

    Raises:
        ConfigError: the folder holds no saved model, or its card cannot be read.
    """
    path, card = folder / FILE, read(folder)
    if card is None:
        write(folder, folder.resolve().name, "", {EVALUATION: text}, results)
        return
    replaced = {each.task_name for each in results}
    kept = [each for each in card.data.eval_results or () if each.task_name not in replaced]
    card.data.eval_results = [*kept, *results]
    card.data.model_name = card.data.model_name or folder.resolve().name
    card.text = _with_section(card.text, EVALUATION, text)
    write_whole(path, str(card))


def result(task: str, kind: str, dataset: str, metric: str, value: float, *, name: str | None = None) -> Any:
    """A figure as the hub lists it.

    Args:
        task: what was done, shown to people, and by which `add_results` knows what it replaces.
        kind: the hub's word for it, such as ``text-generation``.
        dataset: on what.
        metric: the hub's word for what was measured, such as ``accuracy``.
        value: the figure.
        name: of the metric, shown to people.
    """
    from huggingface_hub import EvalResult

    return EvalResult(
        task_type=kind,
        task_name=task,
        dataset_type=dataset,
        dataset_name=dataset,
        metric_type=metric,
        metric_name=name or metric,
        metric_value=float(value),
    )


def table(rows: Sequence[Sequence[object]], head: Sequence[str] = ("", "")) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(each) for each in line) + " |" for line in lines)


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _config(folder: Path) -> tuple[bool, dict[str, Any]]:
    """Whether a folder holds a pipeline, and the configuration of its model."""
    pipeline = is_pipeline(folder)
    path = folder / DENOISER / "config.json" if pipeline else folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"'{folder}' holds no saved model: {path.name} cannot be read ({one_line(error)})") from error
    if not isinstance(config, dict):
        raise ConfigError(f"'{folder}' holds no saved model: {path} is no configuration")
    return pipeline, config


def _head(config: Mapping[str, Any]) -> str:
    """How the name of a model's class ends, as in `HEADS`."""
    name = next(iter(config.get("architectures") or ()), "")
    known = {host.head for host in all_hosts() if config.get("model_type") in (host.name, host.residual_type)}
    return next((each for each in HEADS.values() if name.endswith(each)), next((h for h in known if h), ""))


def _loading(folder: Path, pipeline: bool, head: str, *, rewired: bool) -> str:
    auto = next((name for name, ending in HEADS.items() if ending == head), "AutoModel")
    library = "diffusers" if pipeline else "transformers"
    loaders = {"pipeline": "DiTPipeline"} if pipeline else {**_INPUTS.get(head, {}), "model": auto}
    ours = rewired or pipeline
    lines = [
        *(["import siamesenorm  # tells the library about this kind of model"] if ours else []),
        f"from {library} import {', '.join(sorted(loaders.values()))}",
        "",
        f"path = {json.dumps(folder.resolve().name)}  # the folder of this file, or its name on the hub",
        *(f"{variable} = {name}.from_pretrained(path)" for variable, name in loaders.items()),
    ]
    install = f"It takes `pip install {_PROJECT}`.\n\n" if ours else ""
    return f"{install}```python\n" + "\n".join(lines) + "\n```"


def _scheme(scheme: Scheme) -> str:
    options = [(f"`{key}`", f"`{json.dumps(value)}`") for key, value in scheme.options().items()]
    return f"`{scheme.name}`, with these options:\n\n" + table(options, ("option", "value"))


def _citation(scheme: Scheme | None) -> str:
    linked = (
        "" if scheme is None else re.sub(r"arXiv (\d+\.\d+)", r"[arXiv \1](https://arxiv.org/abs/\1)", scheme.paper)
    )
    whose = f"The residual scheme is that of {linked}. " if linked else ""
    return (
        f"{whose}The model was made with {_PROJECT}, an independent implementation of SiameseNorm and of the schemes "
        f"it is compared with:\n\n```bibtex\n{_BIBTEX}\n```"
    )


def _with_section(text: str, heading: str, body: str) -> str:
    """A card's text with a section replaced, or put before what is to be cited, or at the end."""
    made = f"## {heading}\n\n{body}\n\n"
    found = re.search(rf"^## {re.escape(heading)}\n.*?(?=^##? |\Z)", text, flags=re.M | re.S)
    if found is None:
        place = text.find(f"\n## {_CITATION}\n") + 1
        start = end = place or len(text)
        made = made if place or text.endswith("\n\n") else "\n" + made
    else:
        start, end = found.span()
    return (text[:start] + made + text[end:]).rstrip("\n") + "\n"
