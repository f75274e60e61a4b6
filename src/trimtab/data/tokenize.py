"""Text to token ids and back, by the `tokenizers` library: a byte-level BPE trained here, or any `tokenizer.json`.

How: every byte is a token to begin with, so no text is unknown; words are split by GPT-4's pattern with at most two
digits to a token (nanochat's choice, which spends fewer entries of a small vocabulary on numbers), and the most
frequent pairs are merged until the vocabulary is full. `<|endoftext|>` ends each document. Text is encoded with special
tokens as plain characters: a source file that contains `<|endoftext|>` must not be able to end a document.
Training is deterministic: same documents in, same file out, whatever the number of threads.

Rejected: SentencePiece (one more format, and lossy on white space), an own BPE (`tokenizers` exists). Limits: text is
encoded in pieces of at most 1 Mi characters, cut at a newline, to bound memory; a tokenizer that prepends a space does
so for each piece.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trimtab.core.atomic import write_text
from trimtab.core.errors import DataError, refusal
from trimtab.core.optional import need

END_OF_TEXT = "<|endoftext|>"
_END_TOKENS = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<|im_end|>",
    "<eos>",
    "<|eot_id|>",
    "<|eot|>",
    "<|end▁of▁sentence|>",
    "<｜end▁of▁sentence｜>",
    "[EOS]",
    "<|return|>",
    "[SEP]",
)
_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_PIECE = 1 << 20
"""Characters encoded at a time."""
_MIN_FREQUENCY = 2
"""A pair that is seen once is memorised text, not a unit of language."""


def pieces(text: str, size: int = _PIECE) -> Iterator[str]:
    """A text in pieces of at most `size` characters, cut after a newline where there is one in the second half."""
    start = 0
    while len(text) - start > size:
        cut = text.rfind("\n", start + size // 2, start + size) + 1 or start + size
        yield text[start:cut]
        start = cut
    yield text[start:] if start else text


class Tokenizer:
    """A tokenizer with a known end-of-text token. Make one with `load` or `train`."""

    def __init__(self, inner: Any, eos_id: int) -> None:
        self._inner = inner
        self.eos_id = eos_id
        """Id of the token that ends a document."""
        self.eos_token = str(inner.id_to_token(eos_id))
        self.vocab_size: int = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        """One above the largest id (ids may have gaps): the rows an embedding needs."""
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """Read a `tokenizer.json`, or the one in a folder.

        Raises:
            DataError: missing, malformed, or without an end-of-text token.
        """
        path = Path(path).expanduser()
        if path.is_dir():
            path = path / "tokenizer.json"
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                refusal("data.tokenizer", str(path), f"must be a readable tokenizer.json ({error})", "check the path")
            ) from error
        try:
            inner = need("tokenizers", "train", "A tokenizer").Tokenizer.from_str(content)
        except DataError:
            raise
        except Exception as error:  # tokenizers raises bare Exception
            raise DataError(
                refusal(
                    "data.tokenizer",
                    str(path),
                    f"must be a tokenizer.json of 'tokenizers' ({error})",
                    "download it anew",
                )
            ) from error
        return cls(inner, _find_eos(inner, path))

    @property
    def hash(self) -> str:
        """Hex BLAKE2b-128 of the tokenizer's definition."""
        return hashlib.blake2b(self._inner.to_str().encode(), digest_size=16).hexdigest()

    def encode(self, text: str, allow_special: bool = False) -> npt.NDArray[np.uint32]:
        """Token ids of a text, no begin or end tokens; `allow_special` lets `<|...|>` in the text act (prompts)."""
        if allow_special:
            self._inner.encode_special_tokens = False
            try:
                return np.array(self._inner.encode(text, add_special_tokens=False).ids, dtype=np.uint32)
            finally:
                self._inner.encode_special_tokens = True
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """Token ids of each text; long texts go in pieces (see the module)."""
        cut = [list(pieces(text)) for text in texts]
        flat = [piece for group in cut for piece in group]
        done = iter(self._inner.encode_batch_fast(flat, add_special_tokens=False))
        result = []
        for group in cut:
            parts = [np.array(next(done).ids, dtype=np.uint32) for _ in group]
            result.append(parts[0] if len(parts) == 1 else np.concatenate(parts))
        return result

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of token ids; incomplete UTF-8 shows as U+FFFD."""
        return str(self._inner.decode([int(token) for token in ids], skip_special_tokens=skip_special))

    def save(self, path: Path) -> None:
        """Write a `tokenizer.json`, complete or not at all."""
        write_text(path, self._inner.to_str(pretty=True))


def _find_eos(inner: Any, path: Path) -> int:
    names = list(_END_TOKENS)
    config = path.with_name("tokenizer_config.json")
    if config.is_file():
        try:
            named = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
        except (OSError, ValueError, AttributeError):
            named = None
        named = named.get("content") if isinstance(named, dict) else named
        if isinstance(named, str):
            names.insert(0, named)
    for name in names:
        found = inner.token_to_id(name)
        if found is not None:
            return int(found)
    raise DataError(
        refusal(
            "data.tokenizer",
            str(path),
            f"must have an end-of-text token such as {', '.join(_END_TOKENS[:4])}",
            "name it as eos_token in a tokenizer_config.json beside it",
        )
    )


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of exactly `vocab_size` tokens, `<|endoftext|>` included.

    Raises:
        DataError: the text allows fewer; the message names the size that was reached.
    """
    lib = need("tokenizers", "train", "Training a tokenizer")
    inner = lib.Tokenizer(lib.models.BPE())
    split = lib.pre_tokenizers.Split(lib.Regex(_PATTERN), behavior="isolated")
    level = lib.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = lib.pre_tokenizers.Sequence([split, level])
    inner.decoder = lib.decoders.ByteLevel()
    trainer = lib.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=_MIN_FREQUENCY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(lib.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator((piece for text in texts for piece in pieces(text, 1 << 16)), trainer=trainer)
    reached = inner.get_vocab_size(with_added_tokens=True)
    if reached < vocab_size:
        raise DataError(
            refusal(
                "data.vocab_size",
                vocab_size,
                f"must be at most {reached}, all that this text allows",
                f"set it to {reached} or less, or add text",
            )
        )
    return Tokenizer(inner, int(inner.token_to_id(END_OF_TEXT)))
