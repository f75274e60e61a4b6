"""Shared by all tests: a small corpus on disk, a cache of its own, no network."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ[variable] = "1"
# Its handler keeps the error stream of the test that imported it first, which is closed by the next one.
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "boil", "my")


def tiny_text(number: int, words: int = 400) -> str:
    """Text number `number`: repetitive enough to be learned in a few steps, different for each number."""
    picked = [WORDS[(i * (number + 3) + i // 7) % len(WORDS)] for i in range(words)]
    return f"document {number}\n" + "\n".join(" ".join(picked[i : i + 9]) for i in range(0, words, 9))


@pytest.fixture(scope="session")
def corpus_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 40 small text files."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(40):
        (folder / f"{number:02d}.txt").write_text(tiny_text(number), encoding="utf-8")
    return folder


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Corpora and measured peaks of tests do not mix with those of the person who runs them."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _ieee_arithmetic() -> Iterator[None]:
    """A run in this process flushes denormals for speed; the next test gets IEEE arithmetic back."""
    yield
    if "torch" in sys.modules:
        import torch

        torch.set_flush_denormal(False)


@pytest.fixture(scope="session")
def tiny_flags(corpus_dir: Path) -> list[str]:
    """Flags of a run that takes about ten milliseconds a step."""
    return [
        *("--data.path", str(corpus_dir)),
        *("--data.vocab_size", "300"),
        *("--data.sequence_length", "32"),
        *("--data.val_fraction", "0.1"),
        *("--train.batch_tokens", "128"),
        *("--model.preset", "llama-1m"),
        *("--model.dim", "64"),
        *("--model.num_heads", "2"),
        *("--model.num_layers", "2"),
        *("--train.compile", "off"),
        *("--evaluate.tokens", "256"),
        *("--evaluate.sample_tokens", "8"),
    ]
