"""Token shards: what is written is read, and what is damaged is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimtab.core.errors import DataError
from trimtab.data import ShardWriter, TokenShard, check_vocabulary


def write(path: Path, documents: list[list[int]], vocab_size: int = 1000) -> Path:
    with ShardWriter(path, vocab_size, 1) as writer:
        for number, ids in enumerate(documents):
            writer.add(f"d{number}", np.array(ids, dtype=np.uint32), 3)
    return path


@given(documents=st.lists(st.lists(st.integers(0, 69_999), max_size=9), max_size=6), wide=st.booleans())
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip(tmp_path: Path, documents: list[list[int]], wide: bool) -> None:
    vocab_size = 70_000 if wide else 60_000
    documents = [[token % vocab_size for token in ids] for ids in documents]
    shard = TokenShard(write(tmp_path / "a.tokens", documents, vocab_size), vocab_size)
    shard.verify()
    assert shard.tokens.dtype == (np.uint32 if wide else np.uint16)
    assert shard.tokens.tolist() == [token for ids in documents for token in [*ids, 1]]
    assert shard.num_documents == len(documents)
    assert shard.num_bytes == 3 * len(documents)
    assert [int(start) for start in shard.document_starts] == np.cumsum([0, *(len(d) + 1 for d in documents)])[
        :-1
    ].tolist()
    assert [shard.document_name(i) for i in range(len(documents))] == [f"d{i}" for i in range(len(documents))]


def test_truncated_at_any_length(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tokens", [[1, 2, 3], [4]])
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(
            DataError, match=rf"a.tokens' is truncated: expected .* bytes, found {size}: delete its folder"
        ):
            TokenShard(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(DataError, match="is too long: expected"):
        TokenShard(path)


def test_damage_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tokens", [[1, 2, 3], [4]])
    whole = bytearray(path.read_bytes())
    for place in range(128):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(DataError):
            TokenShard(path)
    for place in range(128, len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="is damaged \\(its checksum differs\\)"):
            TokenShard(path).verify()
    path.write_bytes(b"PK" + bytes(200))
    with pytest.raises(DataError, match="is not a token shard"):
        TokenShard(path)
    path.write_bytes(whole[:8] + b"\x09" + whole[9:])
    with pytest.raises(DataError, match="has schema 9, above 1: use a newer trimtab"):
        TokenShard(path)
    with pytest.raises(DataError, match="cannot be read"):
        TokenShard(tmp_path / "none")


def test_token_id_out_of_range(tmp_path: Path) -> None:
    shard = TokenShard(write(tmp_path / "a.tokens", [[1, 500]]))
    with pytest.raises(DataError, match="token id out of range, 500 must be below the vocabulary size 400"):
        check_vocabulary([shard], 400)
    with pytest.raises(DataError, match="token id out of range"):
        TokenShard(shard.path, 500)
    with pytest.raises(DataError, match="token id must be below the vocabulary size 1000, but got 1000"):
        write(tmp_path / "b.tokens", [[1000]])
