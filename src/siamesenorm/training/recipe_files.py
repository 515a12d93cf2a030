"""Recipes as YAML files, what they take from one another, and ``key.sub=value`` overrides on top of them."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from siamesenorm.residual import ConfigError, nearest, one_line
from siamesenorm.training.recipe import (
    Recipe,
    from_mapping,
    kind_of,
    nearest_key,
    open_mappings,
    to_mapping,
    valid_keys,
)

_EXTENDS = "extends"
_MOST_VALUES = 100_000
_FOLDERS = {"recipe": "recipes", "study": "studies"}


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-3 is a number and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} is given twice", node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1 asks for a dot and a signed exponent in a float, which makes text of the way most people write a rate.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def packaged_folder(kind: str = "recipe") -> Path:
    """Where the files that come with the package are: inside an installed one, next to src/ in a checkout.

    Args:
        kind: ``recipe`` or ``study``.
    """
    package = Path(__file__).resolve().parents[1]
    installed = package / _FOLDERS[kind]
    return installed if installed.is_dir() else package.parents[1] / _FOLDERS[kind]


def packaged_names(kind: str = "recipe") -> list[str]:
    """The names of the recipes or studies that come with the package."""
    return sorted(path.stem for path in packaged_folder(kind).glob("*.yaml"))


def load(recipe: str, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe by name or path, with overrides applied.

    Args:
        recipe: the name of a recipe of the package, or the path of a YAML file. Its key ``extends``, a name or a path
            relative to its own folder, takes all values that it does not give itself from another recipe.
        overrides: ``key.sub=value`` texts; values are read as YAML. One that changes ``model.scheme`` drops the
            recipe's own ``model.options``, which belong to the other scheme; so does a recipe that extends another.

    Raises:
        ConfigError: for a recipe that does not exist or cannot be read, and all that `from_mapping` refuses.
    """
    tree = _extended(find(recipe))
    tree.setdefault("name", Path(recipe).stem)
    return from_mapping(_apply(tree, overrides))


def find(name: str, kind: str = "recipe") -> Path:
    """The file of a recipe or study given by name or path.

    Raises:
        ConfigError: naming the nearest there is.
    """
    if _is_path(name):
        path = Path(name)
        if path.is_file():
            return path
        names = ", ".join(packaged_names(kind))
        raise ConfigError(f"there is no {kind} file '{name}'; the package's {_FOLDERS[kind]}: {names}")
    packaged = packaged_folder(kind) / f"{name}.yaml"
    if not name or not packaged.is_file():
        raise ConfigError(f"unknown {kind} '{name}'; {nearest(name, packaged_names(kind))}")
    return packaged


def beside(path: Path, recipe: str) -> str:
    """The recipe that the file at ``path`` names: a name as it is, a path relative to the file's folder."""
    return str(path.parent / recipe) if _is_path(recipe) else recipe


def _is_path(name: str) -> bool:
    path = Path(name)
    return path.suffix in (".yaml", ".yml") or path.parent != Path(".")


def read(path: Path, kind: str = "recipe") -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: where the file cannot be read or holds anything else.
    """
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the {kind} {path}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {one_line(error)}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no {kind}: a mapping of keys to values is expected")
    if not _is_small(tree):
        raise ConfigError(
            f"{path} holds a mapping that contains itself, or more than {_MOST_VALUES:,} values where its aliases are "
            "followed"
        )
    return _copy(tree)


def dump(recipe: Recipe) -> str:
    """A recipe as YAML that `read` and `from_mapping` turn back into an equal one."""
    return yaml.safe_dump(to_mapping(recipe), sort_keys=False, allow_unicode=True)


def _extended(path: Path, below: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The mapping in a file on top of the one that it extends."""
    tree = read(path)
    if _EXTENDS not in tree:
        return tree
    parent = tree.pop(_EXTENDS)
    if not isinstance(parent, str):
        raise ConfigError(f"{_EXTENDS} in {path} must be a recipe's name or path, not {parent!r}")
    base = find(beside(path, parent)).resolve()
    chain = (*below, path.resolve())
    if base in chain:
        raise ConfigError(f"{path} extends itself, by way of {base}")
    inherited = _extended(base, chain)
    inherited.pop("name", None)
    model = tree.get("model")
    _drop_options(inherited, model.get("scheme") if isinstance(model, dict) else None)
    return _merged(inherited, tree)


def _drop_options(tree: dict[str, Any], scheme: Any) -> None:
    """Take the scheme's options out of a recipe that is about to be given another scheme."""
    model = tree.get("model")
    if scheme is not None and isinstance(model, dict) and model.get("scheme") != scheme:
        model.pop("options", None)


def _merged(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` put in, mapping by mapping."""
    out = dict(base)
    for key, value in changes.items():
        old = out.get(key)
        out[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return out


def _apply(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`tree` with overrides put in."""
    changes: dict[str, Any] = {}
    for text in overrides:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise ConfigError(f"'{text}' is no override; write key.sub=value")
        parsed = parse_value(key, value)
        if key in changes and changes[key] != parsed:
            raise ConfigError(f"{key} is given twice, as {changes[key]!r} and as {parsed!r}")
        changes[key] = parsed
    out = _copy(tree)
    _drop_options(out, changes.get("model.scheme"))
    kind = kind_of({**out, **({"task": changes["task"]} if "task" in changes else {})})
    for key, value in changes.items():
        _set(out, key, value, kind)
    return out


def parse_value(key: str, text: str) -> Any:
    """The value that ``text`` is in YAML, given for ``key``.

    Raises:
        ConfigError: for text that is not YAML.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"the value of {key} cannot be read as YAML: {one_line(error)}") from error


def _is_small(tree: Any) -> bool:
    """Whether a tree has no more values than a file of ours ever has: a few aliases of aliases are more than memory."""
    left, waiting = _MOST_VALUES, [tree]
    while waiting and len(waiting) <= left:
        value = waiting.pop()
        left -= 1
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return not waiting


def _copy(value: Any) -> Any:
    return {key: _copy(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value


def _set(tree: dict[str, Any], key: str, value: Any, kind: type[Recipe]) -> None:
    inside_open = any(key.startswith(f"{name}.") and key.count(".") == 2 for name in open_mappings())
    if key not in valid_keys(kind) and not inside_open:
        raise ConfigError(f"unknown key '{key}'; {nearest_key(key, kind)}")
    *path, leaf = key.split(".")
    node = tree
    for step in path:
        inner = node.setdefault(step, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"cannot set {key}: '{step}' is not a mapping in this recipe")
        node = inner
    node[leaf] = value
