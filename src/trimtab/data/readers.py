"""One reader per file format: each turns a file into (id, text) pairs and words what is wrong with the file.

How: text files stream through one buffer of at most `limit` bytes, cut after a newline where the second half of the
buffer has one, else between two characters, so a file of any size costs the memory of one document. Lines of jsonl,
row batches of parquet and of Hugging Face datasets stream likewise.

Rejected: guessing encodings (a wrong guess poisons a corpus silently; UTF-8 or an error with the byte offset),
`errors="replace"` (same reason), skipping bad jsonl lines (the user would never learn of them).
Limits: one jsonl line and one parquet row are held in memory whole. Sizes are UTF-8 bytes.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from trimtab.core.errors import DataError, nearest, refusal
from trimtab.core.optional import need

Pairs = Iterator[tuple[str, str]]


def _open(path: Path) -> io.BufferedReader:
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError(
            refusal("data.path", str(path), f"must be readable ({error.strerror})", "check its permissions")
        ) from error


def cut_point(piece: bytes, limit: int) -> int:
    """Where to cut bytes that are longer than `limit`: after the last newline of the second half, else at a character.

    >>> cut_point(b"one\\ntwo\\nthree", 10), cut_point("ab\\u00e9".encode(), 3)
    (8, 2)
    """
    newline = piece.rfind(b"\n", limit // 2, limit)
    if newline >= 0:
        return newline + 1
    cut = limit
    while cut > 0 and cut < len(piece) and piece[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut or limit


def split_text(name: str, text: str, limit: int) -> Pairs:
    """A document as one or more (id, text) of at most `limit` bytes; pieces after the first are named `id#n`."""
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            refusal(
                "A document", name, f"must be valid Unicode (lone surrogate at character {error.start})", "repair it"
            )
        ) from error
    if len(content) <= limit:
        yield name, text
        return
    start = number = 0
    while start < len(content):
        rest = content[start : start + limit + 4]
        length = len(rest) if len(content) - start <= limit else cut_point(rest, limit)
        yield (f"{name}#{number}" if number else name), content[start : start + length].decode()
        start, number = start + length, number + 1


def _decode(piece: bytes, path: Path, offset: int) -> str:
    nul = piece.find(b"\0")
    if nul >= 0:
        raise DataError(
            f"{str(path)!r} must hold text, but it is binary (a NUL at byte {offset + nul}): "
            f"remove it from the folder or convert it to UTF-8 text."
        )
    try:
        return piece.decode()
    except UnicodeDecodeError as error:
        where = offset + error.start
        raise DataError(
            f"{str(path)!r} must be UTF-8, but byte {where} is {piece[error.start]:#04x} ({error.reason}): "
            f"convert it, for example with 'iconv -f latin1 -t utf-8'."
        ) from error


def read_text(path: Path, name: str, limit: int) -> Pairs:
    """A `.txt .md .py` file, cut into pieces of at most `limit` bytes while it streams."""
    with _open(path) as handle:
        carry, offset, number, end = b"", 0, 0, False
        while not end or carry:
            if not end:
                more = handle.read(limit + 4 - len(carry))
                end = len(more) < limit + 4 - len(carry)
                carry += more
            length = len(carry) if end and len(carry) <= limit else cut_point(carry, limit)
            piece, carry = carry[:length], carry[length:]
            text = _decode(piece, path, offset)
            if offset == 0:
                text = text.removeprefix("\ufeff")
            if piece:
                yield (f"{name}#{number}" if number else name), text
            offset, number = offset + length, number + 1


def _field(row: dict[str, Any], text_field: str, where: str) -> str:
    if text_field not in row:
        raise _missing_field(text_field, row, where)
    value = row[text_field]
    if not isinstance(value, str):
        raise DataError(
            refusal(f"{where}: field {text_field!r}", value, "must be text", "choose another with data.text_field")
        )
    return value


def _missing_field(text_field: str, known: Iterable[str], where: str) -> DataError:
    names = list(known)
    near = nearest(text_field, names)
    hint = f"did you mean {near!r}" if near else f"set data.text_field to one of {', '.join(names[:10]) or '(none)'}"
    return DataError(refusal("data.text_field", text_field, f"must be a field of {where}", hint))


def _json_lines(handle: Iterable[bytes], path: Path, name: str, text_field: str, limit: int) -> Pairs:
    for number, line in enumerate(handle, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{str(path)!r} line {number} is not JSON ({error}): repair or remove that line."
            ) from error
        if not isinstance(row, dict):
            shown = type(row).__name__
            raise DataError(f"{str(path)!r} line {number} must be a JSON object, but got a {shown}: repair that line.")
        text = _field(row, text_field, f"{str(path)!r} line {number}")
        yield from split_text(f"{name}:{number}", text, limit)


def read_jsonl(path: Path, name: str, limit: int, text_field: str) -> Pairs:
    """A `.jsonl` file: one object a line, its `text_field` a document; ids are `name:line`."""
    with _open(path) as handle:
        yield from _json_lines(handle, path, name, text_field, limit)


def read_jsonl_zst(path: Path, name: str, limit: int, text_field: str) -> Pairs:
    """A `.jsonl.zst` file, decompressed as it streams (several frames are fine)."""
    zstandard = need("zstandard", "train", "Reading .jsonl.zst")
    with _open(path) as handle:
        reader = zstandard.ZstdDecompressor().stream_reader(handle, read_across_frames=True)
        try:
            yield from _json_lines(io.BufferedReader(reader, 1 << 20), path, name, text_field, limit)
        except zstandard.ZstdError as error:
            raise DataError(
                f"{str(path)!r} is not a valid zstd file ({error}): download or compress it anew."
            ) from error


def read_parquet(path: Path, name: str, limit: int, text_field: str) -> Pairs:
    """A `.parquet` file: its column `text_field`; nulls are passed over; ids are `name:row`."""
    parquet = need("pyarrow.parquet", "train", "Reading .parquet")
    arrow = need("pyarrow", "train", "Reading .parquet")
    try:
        file = parquet.ParquetFile(path)
        if text_field not in file.schema_arrow.names:
            raise _missing_field(text_field, file.schema_arrow.names, repr(str(path)))
        number = 0
        for batch in file.iter_batches(batch_size=512, columns=[text_field]):
            for value in batch.column(0).to_pylist():
                if value is not None:
                    text = _field({text_field: value}, text_field, f"{str(path)!r} row {number}")
                    yield from split_text(f"{name}:{number}", text, limit)
                number += 1
    except (arrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{str(path)!r} is not a readable parquet file ({reason}): download or write it anew."
        ) from error


def is_hugging_face(folder: Path) -> bool:
    """Whether a folder was written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return (folder / "dataset_dict.json").is_file() or (
        (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file()
    )


def read_hugging_face(folder: Path, limit: int, text_field: str) -> Pairs:
    """A Hugging Face dataset folder; of a dictionary of splits, `train`, or all of them where there is no `train`."""
    datasets = need("datasets", "hf", "Reading a Hugging Face dataset folder")
    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # the library raises its own and Arrow's errors alike
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{str(folder)!r} is not a readable Hugging Face dataset ({reason}): save it anew.") from error
    if isinstance(loaded, dict):
        splits = {"train": loaded["train"]} if "train" in loaded else dict(sorted(loaded.items()))
    else:
        splits = {"data": loaded}
    for split, rows in splits.items():
        if text_field not in rows.column_names:
            raise _missing_field(text_field, rows.column_names, f"the dataset {str(folder)!r}")
        number = 0
        for batch in rows.select_columns([text_field]).iter(batch_size=512):
            for value in batch[text_field]:
                if value is not None:
                    text = _field({text_field: value}, text_field, f"{split} row {number}")
                    yield from split_text(f"{split}:{number}", text, limit)
                number += 1


READERS: dict[str, Callable[[Path, str, int, str], Pairs]] = {
    ".jsonl.zst": read_jsonl_zst,
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
    ".txt": lambda path, name, limit, _: read_text(path, name, limit),
    ".md": lambda path, name, limit, _: read_text(path, name, limit),
    ".py": lambda path, name, limit, _: read_text(path, name, limit),
}
"""Reader by file suffix: (path, id, limit in bytes, text field) to (id, text) pairs."""


def suffix_of(path: Path) -> str:
    """The supported suffix that a file name ends in, or "".

    >>> suffix_of(Path("a.JSONL.zst")), suffix_of(Path("b.csv"))
    ('.jsonl.zst', '')
    """
    name = path.name.lower()
    return next((suffix for suffix in READERS if name.endswith(suffix)), "")
