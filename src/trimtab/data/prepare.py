"""From a data section to a corpus on disk: read, make unique, split, train a tokenizer, tokenize, cache.

How: (1) a fingerprint of the input (path, size and time of each file, and the settings) finds a corpus built before, in
milliseconds. Otherwise, holding a lock: (2) documents are spooled to part files (`spool.py`), (3) their digest with the
settings gives the content key, which may exist already (files were only touched), (4) a BPE is trained on a sample of
training documents, or a given one loaded, (5) workers tokenize the parts (`encode_worker.py`), (6) the folder is
renamed into place (`cache.py`). The result depends on the documents and the settings, never on the number of workers.

Rejected: tokenizing in the training loop (costs each epoch, and makes the order depend on timing). Limits: building
needs the disk space of text and tokens together; the tokenizer sees a sample of 16 MiB, chosen by document hash.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from trimtab.config.sections import DataSection
from trimtab.core.atomic import file_hash, write_text
from trimtab.core.errors import DataError, refusal
from trimtab.core.folders import cache_root
from trimtab.data import index, sources, spool, tokenize
from trimtab.data.cache import Cache, digest_of
from trimtab.data.encode_worker import encode_parts
from trimtab.data.index import TokenShard
from trimtab.data.readers import cut_point
from trimtab.data.sources import Document
from trimtab.data.spool import TRAIN, VAL, Spool
from trimtab.data.tokenize import Tokenizer

FORMAT = 1
"""Raised when the same input would give another corpus; old caches are then not found."""
_SAMPLE_BYTES = 16 << 20
"""Text a tokenizer is trained on: pair counts are stable long before, and time grows with it."""
_WORKER_BYTES = 2 << 20
"""Text below which one more process costs more to start than it saves."""

Progress = Callable[[str, float, float], None]
"""Called with (what is being done, amount done, total amount); the unit of the amounts is bytes of text."""


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: token shards on disk and the tokenizer they were made with."""

    folder: Path
    train: tuple[TokenShard, ...]
    val: tuple[TokenShard, ...]
    tokenizer: Tokenizer
    key: str
    """Content key: equal keys mean equal tokens in equal order."""
    num_documents: int
    """Unique documents, train and validation together."""
    num_duplicates: int
    """Documents dropped because their text was seen before."""

    @property
    def num_train_tokens(self) -> int:
        """Training tokens, end-of-text tokens included."""
        return sum(shard.num_tokens for shard in self.train)

    @property
    def num_val_tokens(self) -> int:
        """Validation tokens, end-of-text tokens included."""
        return sum(shard.num_tokens for shard in self.val)

    @property
    def bytes_per_token_val(self) -> float:
        """UTF-8 bytes per validation token, end-of-text counted: bits per byte = loss / ln 2 / this."""
        return sum(shard.num_bytes for shard in self.val) / self.num_val_tokens

    @cached_property
    def val_document_ids(self) -> tuple[str, ...]:
        """Ids of the held-out documents."""
        return tuple(shard.document_name(i) for shard in self.val for i in range(shard.num_documents))

    def verify(self) -> None:
        """Read all shards and check their checksums; raises `DataError` where one is damaged."""
        for shard in (*self.train, *self.val):
            shard.verify()


def fingerprint(section: DataSection) -> str:
    """A hash of what the input looks like from outside: file paths, sizes, modification times, and settings."""
    files = []
    for _, path in sources.source_files(section):
        try:
            stat = path.stat()
        except OSError:
            continue
        files.append((str(path), stat.st_size, stat.st_mtime_ns))
    ignored = {"cache_dir", "num_workers", "sequence_length", "packing"}
    settings = {k: v for k, v in dataclasses.asdict(section).items() if k not in ignored}
    return digest_of(FORMAT, index.SCHEMA, settings, _tokenizer_key(section), files)


def _tokenizer_key(section: DataSection) -> str:
    if not section.tokenizer:
        return f"bpe-{section.vocab_size}"
    path = Path(section.tokenizer).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise DataError(refusal("data.tokenizer", section.tokenizer, "must be a tokenizer.json or a folder with one"))
    config = path.with_name("tokenizer_config.json")
    return file_hash(path) + (file_hash(config) if config.is_file() else "")


def prepare_corpus(section: DataSection, progress: Progress | None = None) -> Corpus:
    """The corpus that a section describes, from the cache or built now.

    Args:
        section: the `data` section of a configuration.
        progress: called now and then while building; not at all when the cache has it.

    Raises:
        DataError: the input, the tokenizer or the cached corpus is wrong.
        StorageError: the cache folder cannot be written.
    """
    report: Progress = progress or (lambda what, done, total: None)
    cache = Cache(cache_root(section.cache_dir))
    mark = fingerprint(section)
    folder = cache.find(mark)
    if folder is None:
        with cache.lock(mark, lambda: report("waiting for another run that builds this corpus", 0.0, 1.0)):
            folder = cache.find(mark) or _build(section, cache, mark, report)
    corpus = open_corpus(folder)
    if corpus.num_train_tokens <= section.sequence_length:
        raise DataError(
            refusal(
                "data.sequence_length",
                section.sequence_length,
                f"must be below the {corpus.num_train_tokens} training tokens of the corpus",
                "add text or shorten it",
            )
        )
    return corpus


def open_corpus(folder: Path) -> Corpus:
    """Open a complete corpus folder; raises `DataError` if a part of it is missing or damaged."""
    try:
        body = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
        names = {side: [str(name) for name in body[side]] for side in (TRAIN, VAL)}
        key, num_documents, num_duplicates = str(body["key"]), int(body["documents"]), int(body["duplicates"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"The cached corpus {str(folder)!r} is damaged ({error}): delete that folder.") from error
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    shards = {side: tuple(TokenShard(folder / name, tokenizer.vocab_size) for name in names[side]) for side in names}
    return Corpus(folder, shards[TRAIN], shards[VAL], tokenizer, key, num_documents, num_duplicates)


def _build(section: DataSection, cache: Cache, mark: str, report: Progress) -> Path:
    with cache.building(mark) as folder:
        spooled = _spool(section, folder, report)
        key = digest_of(FORMAT, index.SCHEMA, spooled.digest, section.val_fraction, _tokenizer_key(section))
        target = cache.folder(key)
        if not (target / "corpus.json").is_file():
            _tokenize(section, folder, spooled, key, report)
            target = cache.publish(folder, key)
        cache.remember(mark, key)
        return target


def _spool(section: DataSection, folder: Path, report: Progress) -> Spool:
    """Read all documents into a spool with at least one document on each side."""
    total = float(sum(path.stat().st_size for _, path in sources.source_files(section) if path.exists()))
    total = min(total, section.max_bytes) if section.max_bytes else total
    done = shown = 0
    first = Spool(folder / "spool", int(section.val_fraction * 2.0**64))
    for document in sources.iter_documents(section):
        first.add(document)
        done += len(document.text)
        if done - shown > 1 << 20:
            shown = done
            report("reading documents", float(done), max(total, float(done)))
    first.close()
    if all(side.parts for side in first.sides.values()):
        return first
    only = next(side for side in first.sides.values() if side.parts)
    threshold = first.lowest + 1 if only is first.sides[TRAIN] else first.highest
    again = Spool(folder / "spool-again", threshold)
    again.num_duplicates = first.num_duplicates
    documents = (document for part in only.parts for document in spool.read_part(part))
    if first.num_documents == 1:
        head, tail = _split_single(next(documents), section.val_fraction)
        again.add(head, TRAIN)
        again.add(tail, VAL)
    else:
        for document in documents:
            again.add(document)
    again.close()
    if not all(side.parts for side in again.sides.values()):
        raise DataError(
            refusal("The corpus", first.num_documents, "must have text for training and validation", "add text")
        )
    return again


def _split_single(document: Document, val_fraction: float) -> tuple[Document, Document]:
    """The only document of a corpus, in two: its end, from the start of a line, is held out."""
    content = document.text.encode()
    wanted = max(1, int(len(content) * (1.0 - val_fraction)))
    cut = cut_point(content, wanted)
    head, tail = content[:cut].decode("utf-8", "ignore"), content[cut:].decode("utf-8", "ignore")
    if not head.strip() or not tail.strip():
        raise DataError(
            refusal(
                "The corpus", document.text, "must have at least two documents, or one that can be split", "add text"
            )
        )
    return Document(f"{document.id}#train", head), Document(f"{document.id}#val", tail)


def _sample(spooled: Spool) -> Iterator[str]:
    side = spooled.sides[TRAIN]
    share = int(min(1.0, _SAMPLE_BYTES / max(1, side.num_bytes)) * 2**64)
    taken = 0
    for part in side.parts:
        for document in spool.read_part(part):
            # Multiplied by an odd number (Knuth's), so that the choice is independent of the split by the same hash.
            if (spool.document_hash(document.text) * 0x9E3779B97F4A7C15) % 2**64 < share:
                taken += 1
                yield document.text[:_SAMPLE_BYTES]
    if not taken:
        yield next(spool.read_part(side.parts[0])).text[:_SAMPLE_BYTES]


def _tokenize(section: DataSection, folder: Path, spooled: Spool, key: str, report: Progress) -> None:
    total = float(sum(side.num_bytes for side in spooled.sides.values()))
    if section.tokenizer:
        tokenizer = Tokenizer.load(section.tokenizer)
    else:
        report("training the tokenizer", 0.0, total)
        tokenizer = tokenize.train(_sample(spooled), section.vocab_size)
    saved = folder / "tokenizer.json"
    tokenizer.save(saved)
    if section.tokenizer:
        eos = {"eos_token": tokenizer.eos_token}
        write_text(folder / "tokenizer_config.json", json.dumps(eos) + "\n")
    jobs = [(part, folder / f"{part.stem}.tokens") for side in spooled.sides.values() for part in side.parts]
    sizes = [part.stat().st_size for part, _ in jobs]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_workers = min(section.num_workers or cores, max(1, int(total) // _WORKER_BYTES))
    finished: set[int] = set()

    def done(number: int) -> None:
        finished.add(number)
        report("tokenizing", min(total, float(sum(sizes[i] for i in finished))), total)

    report("tokenizing", 0.0, total)
    encode_parts(tokenizer, saved, jobs, num_workers, done)
    for part, _ in jobs:
        part.unlink()
    for leftover in ("spool", "spool-again"):
        if (folder / leftover).is_dir():
            for path in (folder / leftover).iterdir():
                path.unlink()
            (folder / leftover).rmdir()
    body = {
        "format": FORMAT,
        "key": key,
        "documents": spooled.num_documents,
        "duplicates": spooled.num_duplicates,
        TRAIN: [f"{part.stem}.tokens" for part in spooled.sides[TRAIN].parts],
        VAL: [f"{part.stem}.tokens" for part in spooled.sides[VAL].parts],
    }
    write_text(folder / "corpus.json", json.dumps(body, indent=1) + "\n")
