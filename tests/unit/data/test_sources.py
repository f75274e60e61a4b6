"""Reading: every kind of file gives its documents, and every kind of bad input one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.config.sections import DataSection
from trimtab.core.errors import DataError
from trimtab.data import iter_documents
from trimtab.data.readers import split_text


def read(path: Path, **settings: Any) -> dict[str, str]:
    return {document.id: document.text for document in iter_documents(DataSection(path=str(path), **settings))}


def test_text_files_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("two")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.py").write_bytes(b"\xef\xbb\xbfx = 1\n")
    (tmp_path / "c.TXT").write_text("three é")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".hidden.txt").write_text("no")
    (tmp_path / "picture.png").write_bytes(b"\0\0")
    assert list(read(tmp_path).items()) == [("a/z.py", "x = 1\n"), ("b.md", "two"), ("c.TXT", "three é")]
    assert read(tmp_path / "b.md") == {"b.md": "two"}


def test_jsonl_plain_and_compressed(tmp_path: Path) -> None:
    import zstandard

    lines = [{"text": "one", "n": 1}, {"text": "two\n\u2028"}, {"text": " "}]
    content = ("\n\n".join(json.dumps(line) for line in lines) + "\n").encode()
    (tmp_path / "a.jsonl").write_bytes(content)
    packed = zstandard.ZstdCompressor().compress(content[:20]) + zstandard.ZstdCompressor().compress(content[20:])
    (tmp_path / "b.jsonl.zst").write_bytes(packed)
    assert read(tmp_path / "a.jsonl") == {"a.jsonl:1": "one", "a.jsonl:3": "two\n\u2028"}
    assert list(read(tmp_path / "b.jsonl.zst").values()) == ["one", "two\n\u2028"]
    (tmp_path / "b.jsonl.zst").write_bytes(packed[:25] + b"garbage" + packed[25:])
    with pytest.raises(DataError, match=r"b.jsonl.zst' is not a valid zstd file"):
        read(tmp_path / "b.jsonl.zst")


def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"body": ["one", None, "three"], "number": [1, 2, 3]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path, text_field="body") == {"a.parquet:0": "one", "a.parquet:2": "three"}
    with pytest.raises(DataError, match=r"text_field must be a field of .*a.parquet'.*got 'bodi': did you mean 'body'"):
        read(tmp_path, text_field="bodi")
    with pytest.raises(DataError, match=r"field 'number' must be text, but got 1"):
        read(tmp_path, text_field="number")
    (tmp_path / "a.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match=r"a.parquet' is not a readable parquet file"):
        read(tmp_path)


def test_hugging_face_folders_without_torch(tmp_path: Path) -> None:
    program = """
import sys, datasets
from trimtab.config.sections import DataSection
from trimtab.data import iter_documents
rows = datasets.Dataset.from_dict({"text": ["one", "two"], "label": [0, 1]})
rows.save_to_disk(sys.argv[1] + "/single")
datasets.DatasetDict(test=rows.select([1]), train=rows).save_to_disk(sys.argv[1] + "/splits")
for name in ("single", "splits"):
    print([(d.id, d.text) for d in iter_documents(DataSection(path=sys.argv[1] + "/" + name))])
try:
    list(iter_documents(DataSection(path=sys.argv[1] + "/single", text_field="txet")))
except ValueError as error:
    print(error)
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    single, splits, error, torch = done.stdout.strip().splitlines()
    assert single == "[('data:0', 'one'), ('data:1', 'two')]"
    assert splits == "[('train:0', 'one'), ('train:1', 'two')]"
    assert error.endswith("but got 'txet': did you mean 'text'.")
    assert torch == "False"
    next((tmp_path / "single").glob("*.arrow")).write_bytes(b"x")
    with pytest.raises(DataError, match=r"single' is not a readable Hugging Face dataset"):
        read(tmp_path / "single")


def test_the_standard_library_and_docstrings() -> None:
    some = {document.id: document.text for document in iter_documents(DataSection(max_bytes=300_000))}
    assert "__future__.py" in some
    assert sum(len(text.encode()) for text in some.values()) <= 300_000
    assert not [name for name in some if name.startswith(("test/", "site-packages"))]
    strings = list(iter_documents(DataSection(source="docstrings", max_bytes=30_000)))
    assert all(len(document.text) > 200 for document in strings[:-1])
    assert any(":" in document.id for document in strings)


BAD = [
    ("a.txt", b"", r"data.path must hold some text, but '.*a.txt' is empty: name another file"),
    ("a.txt", b" \n\n", r"must hold some text"),
    ("a.txt", b"fine\n\0\1\2", r"a.txt' must hold text, but it is binary \(a NUL at byte 5\): remove it"),
    ("a.txt", b"caf\xe9 au lait", r"a.txt' must be UTF-8, but byte 3 is 0xe9 \(.*\): convert it"),
    ("a.md", b"ends in the middle \xc3", r"byte 19 is 0xc3 \(unexpected end of data\)"),
    ("a.jsonl", b'{"text": "x"}\n{"text": ', r"a.jsonl' line 2 is not JSON \(.*\): repair or remove that line"),
    ("a.jsonl", b"\x80\x81\n", r"a.jsonl' line 1 is not JSON"),
    ("a.jsonl", b"[1]\n", r"line 1 must be a JSON object, but got a list"),
    ("a.jsonl", b'{"txt": "x"}', r"data.text_field must be a field of .*line 1, but got 'text': did you mean 'txt'"),
    ("a.jsonl", b'{"zzz": "x"}', r"set data.text_field to one of zzz"),
    ("a.jsonl", b'{"text": 3}', r"field 'text' must be text, but got 3"),
    ("a.jsonl", b'{"text": "\\ud800"}', r"a.jsonl:1'.*|must be valid Unicode"),
    ("a.csv", b"x", r"data.path must end in one of .jsonl.zst .* but got '.*a.csv'"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD)
def test_bad_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path / name)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.path must exist, but got '.*none': there is no such file"):
        read(tmp_path / "none")
    with pytest.raises(DataError, match=r"must hold a file that ends in .*: the folder has no file at all"):
        read(tmp_path)
    (tmp_path / "x.csv").write_text("a")
    with pytest.raises(DataError, match=r"the folder has .csv; convert"):
        read(tmp_path)
    with pytest.raises(DataError, match=r"data.path must name a file or folder when data.source is 'path'"):
        list(iter_documents(DataSection(source="path")))


@given(text=st.text(alphabet="ab\né€😀 ", min_size=1, max_size=200), limit=st.integers(4, 40))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_cutting_keeps_every_character(text: str, limit: int) -> None:
    parts = [part for _, part in split_text("x", text, limit)]
    assert "".join(parts) == text
    assert all(0 < len(part.encode()) <= limit for part in parts)


def test_a_huge_file_streams(tmp_path: Path) -> None:
    path = tmp_path / "huge.txt"
    lines = "".join(f"line {number} with an é\n" for number in range(2000))
    with open(path, "w", encoding="utf-8", newline="") as handle:
        for _ in range(800):
            handle.write(lines)
    size = path.stat().st_size
    assert size > 30_000_000
    tracemalloc.start()
    total = 0
    for document in iter_documents(DataSection(path=str(path), max_document_bytes=500_000)):
        length = len(document.text.encode())
        assert length <= 500_000
        assert document.text.startswith("line")
        total += length
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == size
    assert peak < 6_000_000


def test_max_bytes_cuts_the_last_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "b.txt").write_text("ééé")
    (tmp_path / "c.txt").write_text("never")
    assert read(tmp_path, max_bytes=6) == {"a.txt": "abc", "b.txt": "é"}
