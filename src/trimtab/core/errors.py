"""One exception tree, and one helper that words every refusal.

    TrimtabError
    |-- UserError (also a ValueError)   your input is wrong: fix it and call again; exit code 2, nothing was written
    |   |-- ConfigError                 a configuration field, flag or TOML file
    |   |-- DataError                   a corpus, a document, a tokenizer, a token shard
    |   |-- CheckpointError             a checkpoint that is damaged, foreign, or of a newer schema
    |   |-- RecordError                 a run directory or a record file that cannot be read
    |   `-- DeviceError                 a device or dtype that this machine does not have
    `-- RunError (also a RuntimeError)  it failed while running: the text says what is safe and how to go on; exit 3
        `-- StorageError                the disk is full or read-only

A mistake of ours is an `assert` or a plain exception, with a traceback: never one of these.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TrimtabError(Exception):
    """The root of all errors that trimtab raises on purpose. Catch it to show `str(error)` to a person."""

    exit_code = 3


class UserError(TrimtabError, ValueError):
    """The caller gave something wrong; correct it and call again. Nothing was changed."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration field, flag or file is wrong; the message names the field, the value, the rule and the fix."""


class DataError(UserError):
    """A corpus, tokenizer or token shard is wrong; the message names the file and the fix."""


class CheckpointError(UserError):
    """A checkpoint cannot be used; the message says why and which other one can."""


class RecordError(UserError):
    """A run directory or record file cannot be read; the message names the file."""


class DeviceError(UserError):
    """The device or dtype asked for is not on this machine; the message lists those that are."""


class RunError(TrimtabError, RuntimeError):
    """It failed while running; the message says what is safe on disk and how to go on."""


class StorageError(RunError):
    """Writing failed (disk full, read-only, permission); free space or choose another folder, then resume."""


def refusal(field: str, value: object, rule: str, fix: str = "") -> str:
    """One sentence: the field, the bad value, the rule, the fix.

    >>> refusal("optim.lr", -1.0, "must be above 0", "try 1e-3")
    'optim.lr must be above 0, but got -1.0: try 1e-3.'
    """
    shown = repr(value)
    if len(shown) > 120:
        shown = shown[:117] + "..."
    sentence = f"{field} {rule}, but got {shown}"
    return f"{sentence}: {fix.rstrip('.')}." if fix else f"{sentence}."


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name closest to `name`, or "" where none is near.

    >>> nearest("optm.lr", ["optim.lr", "data.path"])
    'optim.lr'
    """
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return found[0] if found else ""
