"""Tokenizers: trained ones are exact and deterministic, foreign ones load, bad ones are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.core.errors import DataError
from trimtab.data import Tokenizer
from trimtab.data.tokenize import END_OF_TEXT, pieces, train

TEXTS = [
    f"def function_{i}(value):\n    return value + {i}\n\nthe cat sat on the mat, the dog too\n" for i in range(90)
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(TEXTS, 300)


def test_training(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 300
    assert tokenizer.eos_token == END_OF_TEXT
    assert tokenizer.hash == train(TEXTS, 300).hash
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0])


@given(text=st.text(max_size=60))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_every_text_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_id not in ids


def test_a_text_cannot_end_a_document(tokenizer: Tokenizer) -> None:
    text = f"a{END_OF_TEXT}b"
    assert tokenizer.eos_id not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_id in tokenizer.encode(text, allow_special=True)
    assert tokenizer.eos_id not in tokenizer.encode(text)


def test_pieces_join() -> None:
    text = "".join(TEXTS)
    for size in (7, 64, 1000, len(text), len(text) + 1):
        assert "".join(pieces(text, size)) == text
        assert all(0 < len(piece) <= size for piece in pieces(text, size))


def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        again = Tokenizer.load(path)
        assert (again.hash, again.vocab_size, again.eos_id) == (tokenizer.hash, 300, tokenizer.eos_id)


def test_a_foreign_tokenizer_with_padding_and_truncation(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    body = json.loads((tmp_path / "tokenizer.json").read_text().replace(END_OF_TEXT, "</s>"))
    body["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.eos_token == "</s>"
    assert loaded.encode(TEXTS[0]).tolist() == tokenizer.encode(TEXTS[0]).tolist()
    body = json.loads(json.dumps(body).replace("</s>", "<odd>"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    with pytest.raises(
        DataError, match=r"data.tokenizer must have an end-of-text token such as .*tokenizer_config.json"
    ):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<odd>"}}')
    assert Tokenizer.load(tmp_path).eos_token == "<odd>"


def test_bad_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.tokenizer must be a readable tokenizer.json .* but got"):
        Tokenizer.load(tmp_path / "none.json")
    (tmp_path / "t.json").write_text('{"model": 3}')
    with pytest.raises(DataError, match=r"data.tokenizer must be a tokenizer.json of 'tokenizers'"):
        Tokenizer.load(tmp_path / "t.json")


def test_a_vocabulary_larger_than_the_text_allows() -> None:
    with pytest.raises(
        DataError, match=r"data.vocab_size must be at most 2\d\d, all that .* but got 50000: set it to 2"
    ):
        train(["abc abc abd"], 50_000)
