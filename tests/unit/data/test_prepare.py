"""Preparing a corpus: what goes in comes out, once, on the right side, whatever the number of workers."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trimtab.config.sections import DataSection
from trimtab.core.errors import DataError, RunError, StorageError
from trimtab.core.folders import cache_root
from trimtab.data import Corpus, iter_documents, prepare_corpus
from trimtab.data import prepare as prepare_module
from trimtab.data import spool as spool_module
from trimtab.data.cache import Cache
from trimtab.data.encode_worker import encode_parts
from trimtab.data.index import ShardWriter
from trimtab.data.spool import Spool

WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "xi",
    "omicron",
    "pi",
    "rho",
    "sigma",
    "tau",
]


def make_texts(folder: Path, count: int = 60) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    choose = random.Random(5)
    for number in range(count):
        lines = [" ".join(choose.choices(WORDS, k=8)) for _ in range(12)]
        (folder / f"t{number:03d}.txt").write_text("\n".join(lines) + f"\n{number}\n")
    return folder


@pytest.fixture
def section(tmp_path: Path) -> DataSection:
    return DataSection(
        path=str(make_texts(tmp_path / "texts")),
        cache_dir=str(tmp_path / "cache"),
        vocab_size=300,
        sequence_length=16,
        val_fraction=0.1,
        num_workers=1,
    )


def documents_of(corpus: Corpus, side: str) -> dict[str, str]:
    result = {}
    for shard in getattr(corpus, side):
        ends = [*shard.document_starts[1:].tolist(), shard.num_tokens]
        for index, (start, end) in enumerate(zip(shard.document_starts.tolist(), ends, strict=True)):
            ids = shard.tokens[start:end].tolist()
            assert ids.count(corpus.tokenizer.eos_id) == 1
            assert ids[-1] == corpus.tokenizer.eos_id
            result[shard.document_name(index)] = corpus.tokenizer.decode(ids[:-1])
    return result


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_every_document_is_on_exactly_one_side(section: DataSection) -> None:
    stages: list[str] = []
    corpus = prepare_corpus(section, lambda what, done, total: stages.append(what))
    corpus.verify()
    train, val = documents_of(corpus, "train"), documents_of(corpus, "val")
    assert {**train, **val} == {document.id: document.text for document in iter_documents(section)}
    assert len(train) + len(val) == corpus.num_documents == 60
    assert 1 <= len(val) <= 15
    assert set(corpus.val_document_ids) == set(val)
    assert corpus.bytes_per_token_val == pytest.approx(
        sum(len(text.encode()) for text in val.values()) / corpus.num_val_tokens
    )
    assert stages[0] == "training the tokenizer"
    assert stages[-1] == "tokenizing"


def test_the_second_time_it_comes_from_the_cache(section: DataSection, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare_corpus(section)
    monkeypatch.setattr(prepare_module, "_build", None)
    again = prepare_corpus(dataclasses.replace(section, sequence_length=32, num_workers=2, packing="documents"))
    assert again.folder == first.folder
    monkeypatch.undo()
    os.utime(Path(section.path) / "t000.txt", ns=(1, 1))  # touched, same content
    stages: list[str] = []
    assert prepare_corpus(section, lambda what, done, total: stages.append(what)).folder == first.folder
    assert "tokenizing" not in stages
    (Path(section.path) / "t000.txt").write_text("another text\n")
    assert prepare_corpus(section).folder != first.folder


def test_duplicates_are_dropped_and_the_split_is_stable(section: DataSection, tmp_path: Path) -> None:
    first = prepare_corpus(section)
    for number in range(5):
        shutil.copy(Path(section.path) / f"t{number:03d}.txt", Path(section.path) / f"u{number}.txt")
    (Path(section.path) / "a-new-one.txt").write_text("something else entirely\n")
    second = prepare_corpus(section)
    assert second.num_duplicates == 5
    assert second.num_documents == 61
    assert set(first.val_document_ids) == set(second.val_document_ids) - {"a-new-one.txt"}


def test_workers_do_not_change_the_result(
    section: DataSection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(spool_module, "_PART_BYTES", 4000)
    monkeypatch.setattr(prepare_module, "_WORKER_BYTES", 1)
    one = prepare_corpus(section)
    many = prepare_corpus(dataclasses.replace(section, num_workers=3, cache_dir=str(tmp_path / "other")))
    assert len(one.train) > 3
    assert content(one.folder) == content(many.folder)
    assert [path.name for path in Path(section.cache_dir).iterdir() if path.name.startswith(".")] == []


def test_the_hash_seed_of_python_does_not_matter(section: DataSection, tmp_path: Path) -> None:
    program = (
        "import sys; from trimtab.config.sections import DataSection; from trimtab.data import prepare_corpus;"
        "c = prepare_corpus(DataSection(path=sys.argv[1], cache_dir=sys.argv[2], vocab_size=300, sequence_length=16));"
        "print(c.folder); assert 'torch' not in sys.modules"
    )
    found = []
    for seed in ("0", "1"):
        command = [sys.executable, "-c", program, section.path, str(tmp_path / f"cache{seed}")]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found.append(content(Path(done.stdout.strip())))
    assert found[0] == found[1]


def test_a_given_tokenizer_is_used(section: DataSection, tmp_path: Path) -> None:
    first = prepare_corpus(section)
    first.tokenizer.save(tmp_path / "mine.json")
    second = prepare_corpus(dataclasses.replace(section, tokenizer=str(tmp_path / "mine.json"), vocab_size=4096))
    assert second.tokenizer.hash == first.tokenizer.hash
    with pytest.raises(DataError, match=r"data.tokenizer must be a tokenizer.json or a folder with one, but got '/no'"):
        prepare_corpus(dataclasses.replace(section, tokenizer="/no"))


@pytest.mark.parametrize("fraction", [0.0001, 0.5])
def test_few_documents_still_give_both_sides(section: DataSection, tmp_path: Path, fraction: float) -> None:
    folder = make_texts(tmp_path / "two", 2)
    corpus = prepare_corpus(dataclasses.replace(section, path=str(folder), val_fraction=fraction, vocab_size=260))
    assert len(documents_of(corpus, "train")) == len(documents_of(corpus, "val")) == 1


def test_a_single_document_is_split_at_a_line(section: DataSection, tmp_path: Path) -> None:
    folder = make_texts(tmp_path / "one", 1)
    corpus = prepare_corpus(dataclasses.replace(section, path=str(folder), vocab_size=260))
    (train,), (val,) = documents_of(corpus, "train").values(), documents_of(corpus, "val").values()
    assert train + val == (folder / "t000.txt").read_text()
    assert train.endswith("\n")
    assert len(val) < len(train) / 2


def test_text_that_is_too_little(section: DataSection, tmp_path: Path) -> None:
    path = tmp_path / "tiny.txt"
    path.write_text("x")
    with pytest.raises(DataError, match="must have at least two documents, or one that can be split, but got 'x'"):
        prepare_corpus(dataclasses.replace(section, path=str(path)))
    path.write_text("ab ab ab ab\nab ab ab\n")
    with pytest.raises(
        DataError, match=r"data.vocab_size must be at most 2\d\d, all that this text allows, but got 300"
    ):
        prepare_corpus(dataclasses.replace(section, path=str(path)))
    with pytest.raises(
        DataError, match=r"sequence_length must be below the \d+ training tokens .*but got 512: add text"
    ):
        prepare_corpus(dataclasses.replace(section, path=str(path), vocab_size=257, sequence_length=512))


def test_a_truncated_shard_in_the_cache(section: DataSection) -> None:
    shard = prepare_corpus(section).train[0].path
    os.truncate(shard, shard.stat().st_size - 8)
    with pytest.raises(DataError, match=r"is truncated: expected \d+ bytes, found \d+: delete its folder"):
        prepare_corpus(section)
    shutil.rmtree(shard.parent)
    prepare_corpus(section).verify()


def test_a_full_disk(section: DataSection, monkeypatch: pytest.MonkeyPatch) -> None:
    fired = []

    def full(self: ShardWriter, *rest: Any) -> None:
        fired.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "add", full)
        with pytest.raises(
            StorageError, match=r"Cannot write .*: the disk is full: free some space .* Nothing is lost"
        ):
            prepare_corpus(section)
    assert fired
    assert [path for path in Path(section.cache_dir).iterdir() if path.name.startswith(".building")] == []
    prepare_corpus(section).verify()


def test_a_worker_that_dies_or_cannot_write(section: DataSection, tmp_path: Path, capfd: Any) -> None:
    corpus = prepare_corpus(section)
    saved = corpus.folder / "tokenizer.json"
    parts = Spool(tmp_path / "spool", 1 << 63)
    for document in iter_documents(section):
        parts.add(document)
    parts.close()
    some = [side.parts[0] for side in parts.sides.values()]
    with pytest.raises(RunError, match=r"A tokenizing process died \(exit code 1; out of memory\?\): nothing is lost"):
        encode_parts(corpus.tokenizer, tmp_path / "none", [(part, tmp_path / part.name) for part in some], 2, print)
    assert "DataError" in capfd.readouterr().err
    with pytest.raises(StorageError, match=r"Cannot write .*nowhere/"):
        encode_parts(corpus.tokenizer, saved, [(part, tmp_path / "nowhere" / part.name) for part in some], 2, print)


def test_a_cache_folder_that_cannot_be_written(section: DataSection, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"Cannot write .*file/cache.*Set data.cache_dir") as caught:
        prepare_corpus(dataclasses.replace(section, cache_dir=str(tmp_path / "file" / "cache")))
    assert caught.value.exit_code == 3


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root("") == tmp_path / "trimtab"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root("") == tmp_path / ".cache" / "trimtab"
    assert Cache(tmp_path / "nowhere").find("x") is None
