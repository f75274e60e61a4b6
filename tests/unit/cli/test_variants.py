"""The ways through `trimtab train` that the other tests do not take, each from the command line to a finished run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trimtab.core.records import Evaluation, Sample, Step, read_records

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    "flags",
    [
        ("--train.micro_batch_tokens", 32, "--train.activation_checkpointing", "yes", "--data.packing", "documents"),
        ("--optim.name", "muon", "--train.dtype", "fp32", "--schedule.name", "cosine", "--model.qk_norm", "yes"),
        ("--model.activation", "relu2", "--model.tie_embeddings", "no", "--model.num_kv_heads", 1),
        ("--schedule.small_batch_fraction", 0.5, "--schedule.small_batch_until", 0.5, "--checkpoint.background", "no"),
        ("--schedule.short_sequence_length", 8, "--train.steps", 0, "--train.tokens", 2000, "--evaluate.every", 0),
    ],
)
def test_it_learns(trimtab: Run, flags: tuple[object, ...], tiny_flags: list[str], tmp_path: Path) -> None:
    assert trimtab("train", *tiny_flags, "--run.name", "a", "--train.steps", 12, "--optim.lr", "1e-2", *flags)[0] == 0
    records = list(read_records(tmp_path / "runs/a"))
    losses = [r.loss for r in records if isinstance(r, Evaluation)]
    assert losses[-1] < losses[0] - 0.3
    steps = [r for r in records if isinstance(r, Step)]
    assert sum(s.num_tokens for s in steps) == steps[-1].total_tokens
    assert all(s.mfu > 0 and s.energy_j > 0 and s.cpu_s > 0 and s.memory_bytes > 0 and s.flops > 0 for s in steps)
    assert [r for r in records if isinstance(r, Sample)]


def test_a_compiled_run_equals_an_eager_one(trimtab: Run, tiny_flags: list[str], tmp_path: Path) -> None:
    if not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        pytest.skip("needs a C++ compiler")
    flags = [flag for flag in tiny_flags if flag not in ("--train.compile", "off")]
    for name in ("on", "off"):
        words = ["--run.name", name, "--train.steps", 5, "--train.compile", name, "--train.dtype", "fp32"]
        assert trimtab("train", *flags, *words)[0] == 0
    losses = [[r.loss for r in read_records(tmp_path / "runs" / name) if isinstance(r, Step)] for name in ("on", "off")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.fixture
def tokenizer(trimtab: Run, tiny_flags: list[str], tmp_path: Path) -> Path:
    """A tokenizer of 300 tokens."""
    words = ["--data.cache_dir", tmp_path / "cache", "--train.steps", 1, "--run.name", "first"]
    assert trimtab("train", *tiny_flags, *words)[0] == 0
    return next((tmp_path / "cache").glob("corpora/*/tokenizer.json"))


@pytest.mark.parametrize("family", ["llama", "auto"])
def test_a_hugging_face_folder_is_fine_tuned_and_resumed(
    trimtab: Run, family: str, tokenizer: Path, corpus_dir: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if family == "llama":
        config = transformers.LlamaConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
        )
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    else:
        config = transformers.GPT2Config(vocab_size=300, n_positions=64, n_embd=32, n_layer=2, n_head=2)
        transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    shutil.copy(tokenizer, tmp_path / "model" / "tokenizer.json")
    flags = ["--model.load", tmp_path / "model", "--model.family", family, "--data.path", corpus_dir]
    flags += ["--data.sequence_length", 32, "--data.val_fraction", 0.1, "--train.batch_tokens", 128]
    flags += ["--train.compile", "off", "--optim.lr", "3e-3", "--evaluate.tokens", 256, "--evaluate.sample_tokens", 4]
    assert trimtab("train", *flags, "--train.steps", 15, "--run.name", "tuned")[0] == 0
    losses = [r.loss for r in read_records(tmp_path / "runs/tuned") if isinstance(r, Evaluation)]
    assert losses[-1] < losses[0] - 0.3
    assert trimtab("train", "--resume", "--run.name", "tuned")[0] == 0
