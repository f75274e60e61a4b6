"""Every bad input gets one sentence with the value, the rule and the fix, exit code 2 or 3, and loses nothing."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from trimtab.core.records import Fault, read_records

Run = Callable[..., tuple[int, str, str]]


def refused(result: tuple[int, str, str], *parts: str, code: int = 2) -> None:
    """One line on the error output, no traceback, holding all parts."""
    got, out, err = result
    assert got == code, f"exit {got}: {out}{err}"
    lines = [line for line in err.splitlines() if line.startswith("trimtab: ")]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    for part in parts:
        assert part in lines[0], f"{part!r} is not in {lines[0]!r}"


def no_run(folder: Path) -> None:
    """No run directory was made."""
    assert not list(folder.glob("runs/*"))


def test_a_misspelt_field_names_the_nearest(trimtab: Run, tmp_path: Path) -> None:
    refused(trimtab("train", "--optm.lr", "1e-3"), "'optm.lr'", "did you mean 'optim.lr'")
    refused(trimtab("train", "--optim.learning_rate", "1e-3"), "optim.learning_rate")
    refused(trimtab("trian"), "did you mean 'train'")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--optim.lr", "nan"), ("optim.lr", "must be a finite number", "nan", "0.003")),
        (("--optim.lr", "-1"), ("optim.lr must be above 0", "-1.0")),
        (("--optim.lr", "fast"), ("optim.lr must be a number", "'fast'")),
        (("--train.steps", "1.5"), ("train.steps must be a whole number", "1.5")),
        (
            ("--train.batch_tokens", "1000"),
            ("train.batch_tokens must be a multiple of data.sequence_length = 256", "768"),
        ),
        (("--train.micro_batch_tokens", "768"), ("must divide train.batch_tokens = 2048", "768")),
        (("--schedule.short_sequence_length", "100"), ("must divide data.sequence_length = 256", "100")),
        (("--device", "cuda:97"), ("device.name", "'cuda:97'", "cpu")),
        (("--device", "gpu"), ("device.name", "'gpu'")),
        (("--report.sinks", "tensorbord"), ("report.sinks", "did you mean 'tensorboard'")),
        (("--model.preset", "lama-5m"), ("model.preset", "did you mean 'llama-5m'")),
        (("--model.preset", "llama-3.1-405b"), ("model.preset needs about", "for its state alone", "smaller preset")),
        (
            ("--train.batch_tokens", str(1 << 30)),
            ("train.micro_batch_tokens needs about", "1073741824", "lower it", "train.activation_checkpointing"),
        ),
        (("--run.name", "../up"), ("run.name must be a plain folder name", "'../up'")),
        (("--data.path", "/nowhere"), ("data.path", "/nowhere")),
        (("--model.load", "/nowhere"), ("/nowhere",)),
        (("--model.family", "auto"), ("model.family", "needs model.load")),
        (("--train.seed",), ("--train.seed needs a value",)),
        (("steps=3",), ("steps=3",)),
    ],
)
def test_a_bad_value(
    trimtab: Run, tmp_path: Path, flags: tuple[str, ...], parts: tuple[str, ...], corpus_dir: Path
) -> None:
    own = () if any(flag.startswith("--data.path") for flag in flags) else ("--data.path", str(corpus_dir))
    small = () if "--model.load" in flags else ("--data.vocab_size", "300")
    refused(trimtab("train", *own, *small, *flags), *parts)
    no_run(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("empty.txt", b"", ("data.path", "is empty")),
        ("blank.txt", b" \n\n\t", ("data.path", "is empty")),
        ("garbage.txt", bytes(range(256)) * 40, ("garbage.txt",)),
        ("latin.txt", "Grüße aus Köln, ".encode("latin-1") * 200, ("latin.txt", "UTF-8")),
        ("short.txt", b"one two three four. " * 3, ()),
        ("broken.jsonl", b'{"text": "good"}\n{"text": bad}\n', ("broken.jsonl",)),
        ("other.jsonl", b'{"body": "good"}\n' * 9, ("text", "body")),
        ("table.parquet", b"PAR1 and nothing else", ("table.parquet",)),
        ("image.png", b"\x89PNG", ("image.png",)),
    ],
)
def test_a_bad_corpus(trimtab: Run, tmp_path: Path, name: str, content: bytes, parts: tuple[str, ...]) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    refused(trimtab("train", "--data.path", path, "--data.vocab_size", "300", "--train.steps", "2"), *parts)
    assert path.read_bytes() == content
    no_run(tmp_path)


def test_a_corpus_shorter_than_one_sequence(trimtab: Run, tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"number {number}: " + "some words to learn. " * 4)
    flags = ("--data.path", tmp_path, "--data.vocab_size", "260", "--data.sequence_length", "2048")
    refused(trimtab("train", *flags), "data.sequence_length must be below", "2048", "add text or shorten it")
    no_run(tmp_path)


def test_a_vocabulary_larger_than_the_data_allow(trimtab: Run, tmp_path: Path, corpus_dir: Path) -> None:
    result = trimtab("train", "--data.path", corpus_dir, "--data.vocab_size", "500000")
    refused(result, "data.vocab_size must be at most", "500000", "set it to")
    no_run(tmp_path)


def test_a_truncated_shard_and_a_token_out_of_range(trimtab: Run, tmp_path: Path, tiny_flags: list[str]) -> None:
    cache = tmp_path / "cache"
    flags = [*tiny_flags, "--data.cache_dir", str(cache), "--train.steps", "1"]
    assert trimtab("train", *flags, "--run.name", "a")[0] == 0
    (shard,) = cache.glob("corpora/*/train-*.tokens")
    content = shard.read_bytes()
    shard.write_bytes(content[:-64])
    refused(trimtab("train", *flags, "--run.name", "b"), shard.name)
    bad = bytearray(content)
    struct.pack_into("<Q", bad, 40, 299_999)  # the header's largest id; its own checksum no longer fits
    shard.write_bytes(bad)
    refused(trimtab("train", *flags, "--run.name", "b"), shard.name)
    assert not (tmp_path / "runs" / "b" / "records.jsonl").exists()


def test_a_tokenizer_larger_than_the_model(trimtab: Run, tmp_path: Path, tiny_flags: list[str]) -> None:
    from trimtab.models.architecture import Architecture
    from trimtab.models.hf import save_hf
    from trimtab.models.llama import Llama

    shape = Architecture(vocab_size=100, dim=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16, ffn_dim=64)
    save_hf(Llama(shape), tmp_path / "model")
    cache = tmp_path / "cache"
    assert trimtab("train", *tiny_flags, "--data.cache_dir", cache, "--train.steps", "1")[0] == 0
    (tokenizer,) = cache.glob("corpora/*/tokenizer.json")
    flags = [*tiny_flags[:2], "--data.tokenizer", str(tokenizer), "--model.load", str(tmp_path / "model")]
    refused(trimtab("train", *flags), "must be at most the 100 rows", "300")


def test_resuming_with_another_architecture(trimtab: Run, tmp_path: Path, tiny_flags: list[str]) -> None:
    assert trimtab("train", *tiny_flags, "--train.steps", "2", "--run.name", "a")[0] == 0
    result = trimtab("train", "--resume", "--run.name", "a", "--model.dim", "128")
    refused(result, "model.dim is 64 in this run and cannot change on resume", "start a new run")
    config = tmp_path / "runs/a/config.toml"
    config.write_text(config.read_text().replace("dim = 64", "dim = 128", 1))
    before = (tmp_path / "runs/a/records.jsonl").read_bytes()
    refused(trimtab("train", "--resume", "--run.name", "a"), "is of another architecture", "shape")
    assert (tmp_path / "runs/a/records.jsonl").read_bytes() == before


def test_resuming_from_a_newer_schema(trimtab: Run, tmp_path: Path, tiny_flags: list[str]) -> None:
    assert trimtab("train", *tiny_flags, "--train.steps", "2", "--run.name", "a")[0] == 0
    manifest = tmp_path / "runs/a/checkpoints/step-2/manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "schema": 7}))
    refused(trimtab("train", "--resume", "--run.name", "a"), "schema 7", "reads up to 1")
    assert not [r for r in read_records(tmp_path / "runs/a") if isinstance(r, Fault)]


def test_resuming_what_is_not_there(trimtab: Run) -> None:
    refused(trimtab("train", "--resume"), "no run to resume in 'runs'")
    refused(trimtab("train", "--resume", "--run.name", "x"), "run.name must be a run in 'runs'", "'x'")


def test_a_finished_run_resumes_to_nothing(trimtab: Run, tmp_path: Path, tiny_flags: list[str]) -> None:
    assert trimtab("train", *tiny_flags, "--train.steps", "2", "--run.name", "a")[0] == 0
    code, out, _ = trimtab("train", "--resume", "--run.name", "a")
    assert code == 0
    assert "finished at step 2" in out


def test_an_existing_run_is_not_overwritten(trimtab: Run, tmp_path: Path, tiny_flags: list[str]) -> None:
    assert trimtab("train", *tiny_flags, "--train.steps", "1", "--run.name", "a")[0] == 0
    before = (tmp_path / "runs/a/records.jsonl").read_bytes()
    refused(trimtab("train", *tiny_flags, "--run.name", "a"), "exists already", "--resume --run.name a")
    assert (tmp_path / "runs/a/records.jsonl").read_bytes() == before


def test_a_folder_that_cannot_be_written(trimtab: Run, tmp_path: Path, tiny_flags: list[str]) -> None:
    (tmp_path / "file").write_text("")
    refused(trimtab("train", *tiny_flags, "--run.dir", tmp_path / "file"), "Cannot write", "not a folder", code=3)
    refused(trimtab("train", *tiny_flags, "--data.cache_dir", tmp_path / "file"), "Cannot write", code=3)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
@pytest.mark.parametrize("options", ["ro", "size=256k"])
def test_a_read_only_or_full_disk(trimtab: Run, tmp_path: Path, tiny_flags: list[str], options: str) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.system(f"mount -t tmpfs -o {options} tmpfs {folder} 2>/dev/null"):
        pytest.skip("mounting is not allowed here")
    try:
        result = trimtab("train", *tiny_flags, "--run.dir", folder, "--run.name", "a", "--train.steps", "3")
        refused(result, "Cannot write", "read-only" if options == "ro" else "the disk is full", code=3)
        if options != "ro":
            faults = [r for r in read_records(folder / "a") if isinstance(r, Fault)]
            assert "the disk is full" in faults[0].what
    finally:
        os.system(f"umount {folder}")


def test_a_huge_document_is_read_in_pieces(trimtab: Run, tmp_path: Path) -> None:
    """1 GB in one document (a sparse read: the corpus is told to stop early) does not fill the memory."""
    path = tmp_path / "huge.txt"
    line = b"the same line again and again, a gigabyte long, without a second document\n"
    block = line * (1 << 14)
    with open(path, "wb") as handle:
        for number in range(2**30 // len(block) + 1):
            handle.write(b"block %d\n" % number)
            handle.write(block)
    assert path.stat().st_size > 2**30
    flags = ("--data.path", path, "--data.max_bytes", "2_000_000", "--data.max_document_bytes", "1_000_000")
    flags += ("--data.vocab_size", "280", "--model.preset", "llama-1m", "--train.steps", "1", "--run.name", "a")
    code, out, err = trimtab("train", *flags, "--train.compile", "off", "--evaluate.tokens", "512")
    path.unlink()
    assert code == 0, err
    assert "finished at step 1" in out


def test_other_verbs(trimtab: Run, tmp_path: Path) -> None:
    refused(trimtab("report", tmp_path / "nothing"), "There is no readable run")
    refused(trimtab("compare", tmp_path / "nothing", tmp_path / "nothing"), "There is no readable run")
    refused(trimtab("doctor", "--device", "tpu"), "device.name", "'tpu'")
    bad = tmp_path / "bad.toml"
    bad.write_text("[optim]\nlr = 'fast'\n")
    code, _, err = trimtab("config", "check", bad)
    assert code == 2
    assert "optim.lr must be a number" in err
    bad.write_text("[optim\n")
    refused(trimtab("train", bad), "is not TOML")
    bad.write_text("[optimizer]\nlr = 1.0\n")
    refused(trimtab("train", bad), "unknown section [optimizer]", "did you mean [optim]")
