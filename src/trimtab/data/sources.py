"""Where documents come from: the standard library, docstrings of installed packages, or files of the user's.

How: `source_files` lists the files a section names, in sorted order (the order of a corpus never depends on the file
system); `iter_documents` reads them one after the other. Python files of others are parsed, never imported. Documents
of white space only are passed over, for they hold nothing to learn.

Rejected: a download of a standard corpus (the default must work on every machine without a network), importing
packages to read `__doc__` (runs foreign code). Limits: a symbolic link to a folder is not followed; of files that are
hidden (a name that starts with a dot) nothing is read; stdlib files that are not UTF-8 are passed over.
"""

from __future__ import annotations

import ast
import os
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trimtab.config.sections import DataSection
from trimtab.core.errors import DataError, refusal
from trimtab.data.readers import READERS, cut_point, is_hugging_face, read_hugging_face, split_text, suffix_of

_MIN_DOCSTRING = 200
"""Characters; shorter docstrings are mostly signatures restated."""
_MIN_LIMIT = 4
"""Bytes; the longest UTF-8 character, below which no cut is possible."""


@dataclass(frozen=True)
class Document:
    """A piece of text and where it came from."""

    id: str
    """Relative path, with `:line` (jsonl), `:row` (parquet), `:qualified.name` (docstrings), `#n` (cut pieces)."""
    text: str


def kind_of(section: DataSection) -> str:
    """The source that is meant: a non-empty `data.path` implies `path`."""
    return "path" if section.path else section.source


def _root(section: DataSection) -> Path:
    if not section.path:
        raise DataError(refusal("data.path", section.path, "must name a file or folder when data.source is 'path'"))
    root = Path(section.path).expanduser()
    if not root.exists():
        near = root.parent if root.parent.is_dir() else Path.cwd()
        raise DataError(
            refusal("data.path", section.path, "must exist", f"there is no such file or folder (looked in {near})")
        )
    return root


def _walk(root: Path, skip_folders: frozenset[str], skip_paths: frozenset[str] = frozenset()) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        base = Path(folder).relative_to(root).as_posix()
        folders[:] = [
            name
            for name in folders
            if name not in skip_folders
            and not name.startswith(".")
            and (name if base == "." else f"{base}/{name}") not in skip_paths
        ]
        for name in names:
            if not name.startswith("."):
                yield Path(folder, name)


_STDLIB_SKIP = frozenset({"site-packages", "dist-packages", "__pycache__"})
_STDLIB_SKIP_PATHS = frozenset(
    {"test", "idlelib/idle_test", "lib2to3/tests", "unittest/test", "tkinter/test", "distutils/tests", "ctypes/test"}
)
_PACKAGES_SKIP = frozenset({"__pycache__", "test", "tests", "_vendor", "node_modules"})


def _package_roots() -> list[Path]:
    paths = sysconfig.get_paths()
    return [Path(path) for path in dict.fromkeys((paths["purelib"], paths["platlib"])) if os.path.isdir(path)]


def source_files(section: DataSection) -> list[tuple[Path, Path]]:
    """The files that a section names, as sorted (root, file); for a Hugging Face folder, all its files.

    Raises:
        DataError: the path is missing or holds no supported file.
    """
    kind = kind_of(section)
    if kind == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [(root, path) for path in _walk(root, _STDLIB_SKIP, _STDLIB_SKIP_PATHS) if path.suffix == ".py"]
    elif kind == "docstrings":
        files = [(r, path) for r in _package_roots() for path in _walk(r, _PACKAGES_SKIP) if path.suffix == ".py"]
    else:
        root = _root(section)
        if root.is_file():
            if not suffix_of(root):
                raise DataError(
                    refusal("data.path", section.path, f"must end in one of {' '.join(READERS)}", "rename it")
                )
            return [(root.parent, root)]
        found = list(_walk(root, frozenset({"__pycache__"})))
        files = [(root, path) for path in found if is_hugging_face(root) or suffix_of(path)]
        if not files:
            seen = ", ".join(sorted({path.suffix or "no suffix" for path in found})[:8]) or "no file at all"
            fix = f"the folder has {seen}; convert the files to a supported kind"
            rule = f"must hold a file that ends in one of {' '.join(READERS)}"
            raise DataError(refusal("data.path", section.path, rule, fix))
    return sorted(files, key=lambda pair: (str(pair[0]), pair[1].relative_to(pair[0]).as_posix()))


def _docstrings(path: Path, name: str) -> Iterator[tuple[str, str]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        return
    stack: list[tuple[str, ast.AST]] = [("", tree)]
    while stack:
        scope, node = stack.pop()
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text and len(text) > _MIN_DOCSTRING:
                yield (f"{name}:{scope}" if scope else name), text
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        for child in reversed(inner):
            own = getattr(child, "name", "")
            stack.append((f"{scope}.{own}".strip(".") if own else scope, child))


def _stdlib_text(path: Path, name: str) -> Iterator[tuple[str, str]]:
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return
    if "\0" not in text:
        yield name, text


def _pairs(section: DataSection, limit: int) -> Iterator[tuple[str, str]]:
    kind = kind_of(section)
    if kind == "path" and (root := _root(section)).is_dir() and is_hugging_face(root):
        yield from read_hugging_face(root, limit, section.text_field)
        return
    for root, path in source_files(section):
        name = path.relative_to(root).as_posix()
        if kind == "path":
            yield from READERS[suffix_of(path)](path, name, limit, section.text_field)
        else:
            for identity, text in (_stdlib_text if kind == "stdlib" else _docstrings)(path, name):
                yield from split_text(identity, text.encode("utf-8", "ignore").decode(), limit)


def iter_documents(section: DataSection) -> Iterator[Document]:
    """The documents that a section names, in a fixed order, none longer than `max_document_bytes`.

    Reading stops after `max_bytes` of text (0: never); the last document is then cut to fit.

    Raises:
        DataError: something about the input is wrong; the message names the file, the rule and the fix.
    """
    limit = max(_MIN_LIMIT, section.max_document_bytes)
    total = 0
    some = False
    for identity, text in _pairs(section, limit):
        if not text or text.isspace():
            continue
        if section.max_bytes:
            content = text.encode()
            room = section.max_bytes - total
            if len(content) > room:
                text = content[: cut_point(content, room)].decode("utf-8", "ignore")
            total += len(content)
        if text:
            some = True
            yield Document(identity, text)
        if section.max_bytes and total >= section.max_bytes:
            break
    if not some:
        shown = section.path or kind_of(section)
        raise DataError(f"data.path must hold some text, but {shown!r} is empty: name another file or folder.")
