"""Real processes that build a corpus: one is killed half-way, two build at once."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.config.sections import DataSection
from trimtab.data import prepare as prepare_module
from trimtab.data import prepare_corpus
from trimtab.data import spool as spool_module
from trimtab.data.cache import Cache

PROGRAM = """
import sys
from trimtab.config.sections import DataSection
from trimtab.data import prepare, spool
spool._PART_BYTES = 4000
prepare._WORKER_BYTES = 1
path, cache, workers, stop_at = sys.argv[1:]
def progress(what, done, total):
    print(what, flush=True)
    if what == stop_at and done > 0 or f"{what} 0" == stop_at:
        print("stopped", flush=True)
        sys.stdin.read()  # until killed
corpus = prepare.prepare_corpus(DataSection(path=path, cache_dir=cache, vocab_size=300, sequence_length=16,
                                            num_workers=int(workers)), progress)
print("done", corpus.folder, flush=True)
"""


def make_texts(folder: Path) -> Path:
    folder.mkdir()
    choose = random.Random(3)
    words = ["red", "green", "blue", "black", "white", "orange", "violet", "brown", "pink", "grey", "cyan"]
    for number in range(50):
        lines = [" ".join(choose.choices(words, k=8)) for _ in range(12)]
        (folder / f"t{number:03d}.txt").write_text("\n".join(lines) + "\n")
    return folder


def start(path: Path, cache: Path, workers: int, stop_at: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(path), str(cache), str(workers), stop_at]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def leftovers(cache: Path) -> list[Path]:
    return list(cache.glob(".building-*"))


@pytest.mark.parametrize(
    ("workers", "stop_at"), [(1, "training the tokenizer 0"), (1, "tokenizing"), (2, "tokenizing")]
)
def test_a_build_killed_half_way_is_built_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, stop_at: str
) -> None:
    monkeypatch.setattr(spool_module, "_PART_BYTES", 4000)
    monkeypatch.setattr(prepare_module, "_WORKER_BYTES", 1)
    texts, cache = make_texts(tmp_path / "texts"), tmp_path / "cache"
    process = start(texts, cache, workers, stop_at)
    assert process.stdout is not None
    assert any(line == "stopped\n" for line in process.stdout)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.communicate()
    assert len(leftovers(cache)) == 1, "the kill came half-way"
    assert not list(cache.glob("corpora/*"))
    section = DataSection(path=str(texts), cache_dir=str(cache), vocab_size=300, sequence_length=16, num_workers=1)
    rebuilt = prepare_corpus(section)
    rebuilt.verify()
    assert leftovers(cache) == []
    clean = prepare_corpus(DataSection(**{**vars(section), "cache_dir": str(tmp_path / "clean")}))
    assert content(rebuilt.folder) == content(clean.folder)


def test_leftovers_of_another_corpus_are_cleaned_but_a_live_build_is_not(tmp_path: Path) -> None:
    texts, cache = make_texts(tmp_path / "texts"), tmp_path / "cache"
    live = start(texts, cache, 1, "tokenizing")
    assert live.stdout is not None
    assert any(line == "stopped\n" for line in live.stdout)
    dead = cache / ".building-0123-x"
    dead.mkdir()
    (dead / "half").write_text("x")
    section = DataSection(path=str(texts / "t000.txt"), cache_dir=str(cache), vocab_size=260, sequence_length=16)
    prepare_corpus(section).verify()
    assert not dead.exists()
    assert len(leftovers(cache)) == 1
    output, _ = live.communicate()  # closes its input, so that it goes on
    assert live.returncode == 0
    assert "done" in output


def test_two_processes_at_once_build_one_corpus(tmp_path: Path) -> None:
    texts, cache = make_texts(tmp_path / "texts"), tmp_path / "cache"
    section = DataSection(path=str(texts), cache_dir=str(cache), vocab_size=300, sequence_length=16)
    mark = prepare_module.fingerprint(section)
    with Cache(cache).lock(mark):  # hold both back until both wait for the lock
        both = [start(texts, cache, 1) for _ in range(2)]
        for process in both:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting for another run that builds this corpus\n"
    outputs = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("training the tokenizer" in output for output in outputs) == 1, "one builds, the other reuses"
    folders = {output.splitlines()[-1] for output in outputs}
    assert len(folders) == 1
    assert len(list(cache.glob("corpora/*"))) == 1
    assert leftovers(cache) == []
