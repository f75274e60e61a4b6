"""From TOML and flags to a `RunConfig`, strictly.

Order of precedence: built-in defaults, then the TOML file, then flags (the last of equals wins). No environment
variable ever beats an argument. No abbreviations: a misspelt section or field is answered with the nearest right one,
because a flag that is silently dropped costs a day of training.

The hash covers what changes the mathematics of a run: sections `run` and `report` and the machine's own settings are
left out, so the same experiment on another machine has the same hash.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from trimtab.config.run import RunConfig
from trimtab.core.errors import ConfigError, nearest, refusal

ALIASES = {"device": "device.name"}
"""Flags that stand for a field without naming its section."""
_HASHED = ("data", "model", "optim", "schedule", "train")
_TYPE_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def section_types() -> dict[str, type[Any]]:
    """Section name to its dataclass."""
    return get_type_hints(RunConfig)


def known_fields() -> dict[str, dataclasses.Field[Any]]:
    """Dotted name (`optim.lr`) to dataclass field, for every field there is."""
    return {f"{name}.{item.name}": item for name, cls in section_types().items() for item in dataclasses.fields(cls)}


@functools.cache
def field_docs() -> dict[str, str]:
    """Dotted name to the docstring under the field, on one line."""
    docs: dict[str, str] = {}
    for name, cls in section_types().items():
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        assert isinstance(tree.body[0], ast.ClassDef)
        body = tree.body[0].body
        for statement, after in itertools.pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                if is_text and isinstance(after.value.value, str):  # type: ignore[attr-defined]
                    docs[f"{name}.{statement.target.id}"] = " ".join(after.value.value.split())  # type: ignore[attr-defined]
    return docs


def _unknown(name: str) -> ConfigError:
    known = known_fields()
    near = nearest(name, known)
    section, _, rest = name.partition(".")
    if section in section_types():  # the section is right: look among its own fields first
        near = nearest(rest, [key.split(".")[1] for key in known if key.startswith(section + ".")])
        near = f"{section}.{near}" if near else ""
    hint = f"did you mean {near!r}" if near else "`trimtab config show` lists all fields"
    return ConfigError(f"There is no configuration field {name!r}: {hint}.")


def _convert(where: str, value: Any, target: type[Any], from_text: bool) -> Any:
    """`value` as the field's type; text (from a flag) is parsed, TOML values must already be of the type."""
    word = _TYPE_WORDS[target]
    if target is str:
        if isinstance(value, str):
            return value
        raise ConfigError(refusal(where, value, f"must be {word}", "put it in quotes"))
    if target is bool:
        if isinstance(value, bool):
            return value
        if from_text and str(value).lower() in {"true", "yes", "on", "1", "false", "no", "off", "0"}:
            return str(value).lower() in {"true", "yes", "on", "1"}
        raise ConfigError(refusal(where, value, f"must be {word}", "write true or false"))
    if from_text:
        try:
            number = float(str(value).replace("_", ""))
        except ValueError:
            raise ConfigError(refusal(where, value, f"must be {word}", "write digits, such as 1e-3 or 500")) from None
        if target is int:
            if number != number or number in (float("inf"), float("-inf")) or number != int(number):
                raise ConfigError(refusal(where, value, f"must be {word}", "write digits only"))
            try:
                return int(str(value).replace("_", ""))
            except ValueError:
                return int(number)
        return number
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (target is int and isinstance(value, float)):
        raise ConfigError(refusal(where, value, f"must be {word}", "write it without quotes or a fraction"))
    return target(value)


def parse_overrides(arguments: Sequence[str]) -> dict[str, str]:
    """`["--optim.lr", "1e-3", "--train.steps=40"]` to `{"optim.lr": "1e-3", "train.steps": "40"}`.

    Raises:
        ConfigError: a flag is unknown, has no value, or a word stands where a flag should.
    """
    found: dict[str, str] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise ConfigError(
                refusal("argument", word, "must be a flag of the form --section.field VALUE", "see --help")
            )
        name, has_value, value = word[2:].partition("=")
        name = ALIASES.get(name.replace("-", "_"), name.replace("-", "_"))
        item = known_fields().get(name)
        if item is None:
            raise _unknown(word[2:].partition("=")[0])
        if not has_value:
            if not words or (words[0].startswith("--") and len(words[0]) > 2):
                raise ConfigError(f"--{name} needs a value ({item.metadata['unit']}): write --{name} {item.default!r}.")
            value = words.pop(0)
        found[name] = value
    return found


def apply_overrides(config: RunConfig, changes: Mapping[str, Any], from_text: bool = True) -> RunConfig:
    """A new config with dotted fields changed.

    Args:
        config: the config to start from.
        changes: dotted name to value.
        from_text: values are flag texts, to be parsed; else they are already typed (TOML).

    Raises:
        ConfigError: unknown field, wrong type, or out of range.
    """
    sections: dict[str, dict[str, Any]] = {}
    known = known_fields()
    for name, value in changes.items():
        if name not in known:
            raise _unknown(name)
        section, _, key = name.partition(".")
        target = get_type_hints(section_types()[section])[key]
        sections.setdefault(section, {})[key] = _convert(name, value, target, from_text)
    replaced = {key: dataclasses.replace(getattr(config, key), **values) for key, values in sections.items()}
    if replaced.get("data") is not None and replaced["data"].path and "source" not in sections["data"]:
        replaced["data"] = dataclasses.replace(replaced["data"], source="path")
    return dataclasses.replace(config, **replaced)


def load_config(path: Path | None, overrides: Mapping[str, str] | None = None) -> RunConfig:
    """Read a TOML file (or none) and apply flag overrides.

    Raises:
        ConfigError: the file is missing, not TOML, or holds an unknown or wrong field.
    """
    changes: dict[str, Any] = {}
    if path is not None:
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"There is no configuration file {str(path)!r}: name a .toml file.") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"The configuration file {str(path)!r} cannot be read ({error}).") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"The configuration file {str(path)!r} is not TOML: {error}.") from None
        for section, values in content.items():
            if section not in section_types():
                near = nearest(section, section_types())
                hint = f"did you mean [{near}]" if near else f"sections are {', '.join(section_types())}"
                raise ConfigError(f"{str(path)!r} has an unknown section [{section}]: {hint}.")
            if not isinstance(values, dict):
                raise ConfigError(refusal(section, values, "must be a section", f"write [{section}] on a line"))
            changes.update({f"{section}.{key}": value for key, value in values.items()})
    # One construction, so that rules spanning fields see file and flags together.
    typed = dict(changes)
    config_fields = known_fields()
    for name, text in (overrides or {}).items():
        if name not in config_fields:
            raise _unknown(name)
        section, _, key = name.partition(".")
        typed[name] = _convert(name, text, get_type_hints(section_types()[section])[key], from_text=True)
    return apply_overrides(RunConfig(), typed, from_text=False)


def to_dict(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Plain nested dictionaries, in declaration order."""
    return dataclasses.asdict(config)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def to_toml(config: RunConfig, comments: bool = False) -> str:
    """The whole config as TOML that `load_config` reads back to an equal one; `comments` adds docstrings and units."""
    docs, known, lines = field_docs(), known_fields(), []
    for section, values in to_dict(config).items():
        lines.append(f"[{section}]")
        for key, value in values.items():
            name = f"{section}.{key}"
            if comments:
                lines += textwrap.wrap(
                    f"{docs[name]} ({known[name].metadata['unit']})", 110, initial_indent="# ", subsequent_indent="# "
                )
            lines.append(f"{key} = {_toml_value(value)}")
        lines.append("")
    return "\n".join(lines)


def config_hash(config: RunConfig) -> str:
    """12 hex digits over the sections that change the mathematics of the run."""
    everything = to_dict(config)
    text = json.dumps({name: everything[name] for name in _HASHED}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def diff_configs(first: RunConfig, second: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted names of the fields that differ, each with both values."""
    a, b = to_dict(first), to_dict(second)
    return {
        f"{section}.{key}": (value, b[section][key])
        for section, values in a.items()
        for key, value in values.items()
        if value != b[section][key]
    }
