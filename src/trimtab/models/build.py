"""From the `[model]` section to a module: a preset drawn from a seed, or weights to start from.

    model.load empty           preset, fields changed, weights from the seed
    model.load = *.gguf        dequantized (`models.gguf`)
    model.load = folder        our decoder (`models.hf.load_hf`), or transformers' own with model.family = "auto"

Loaded weights bring their architecture: a field of `[model]` that contradicts it is refused, not ignored. A tokenizer
with fewer tokens than the model has rows is fine (the rest is never seen); one with more is refused.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from trimtab.config.sections import ModelSection
from trimtab.core.atomic import write_text
from trimtab.core.errors import CheckpointError, ConfigError, refusal
from trimtab.models.architecture import Architecture, resolve
from trimtab.models.gguf import gguf_tokenizer, gguf_tokenizer_config, load_gguf, locate
from trimtab.models.hf import AutoModel, load_hf
from trimtab.models.llama import Llama

_SHAPE_FIELDS = ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "activation", "rope_theta")


def build_model(
    section: ModelSection,
    vocab_size: int,
    max_sequence_length: int,
    seed: int,
    device: torch.device | str = "cpu",
    meta: bool = False,
    peak_flops: float = 0.0,
) -> tuple[nn.Module, Architecture]:
    """The model and its architecture, weights in fp32.

    Args:
        section: what to build.
        vocab_size: of the run's tokenizer.
        max_sequence_length: longest sequence of the run (tokens).
        seed: of the initial weights (unused for loaded ones).
        device: where the weights live.
        meta: names and shapes only (presets).
        peak_flops: GEMM rate of the machine (FLOP/s), for `model.preset = "auto"`.

    Raises:
        ConfigError: fields that do not go together.
        CheckpointError: weights that cannot be loaded, or do not fit the tokenizer or the sequence length.
    """
    if not section.load:
        arch = resolve(section, vocab_size, peak_flops, max_sequence_length)
        return Llama(arch, device="meta" if meta else device, seed=seed), arch
    path = locate(section.load)
    if section.family == "auto":
        model: nn.Module = AutoModel(path, max_sequence_length).to(device)
        arch = model.arch  # type: ignore[assignment]
    else:
        arch, state = load_gguf(path) if path.suffix == ".gguf" else load_hf(path)
        _check_fields(section, arch)
        model = Llama(arch, device="meta" if meta else device, seed=None)
        if not meta:
            model.load_state_dict(state)
    if vocab_size > arch.vocab_size:
        rule = f"must be at most the {arch.vocab_size} rows of {section.load}"
        raise CheckpointError(refusal("The tokenizer's vocabulary", vocab_size, rule, "use the model's own tokenizer"))
    if max_sequence_length > arch.max_sequence_length:
        rule = f"must be at most {arch.max_sequence_length}, the context of {section.load}"
        raise ConfigError(refusal("data.sequence_length", max_sequence_length, rule))
    return model, arch


def _check_fields(section: ModelSection, arch: Architecture) -> None:
    """Refuse fields of the section that contradict loaded weights."""
    for name in _SHAPE_FIELDS:
        wanted, found = getattr(section, name), getattr(arch, name)
        if wanted and wanted != found:
            rule = f"must be left out or equal that of model.load, {found!r}"
            raise ConfigError(refusal(f"model.{name}", wanted, rule))
    for name in ("qk_norm", "tie_embeddings"):
        wanted, found = getattr(section, name), getattr(arch, name)
        if wanted and (wanted == "yes") != found:
            rule = f"must be left out or equal that of model.load, {'yes' if found else 'no'}"
            raise ConfigError(refusal(f"model.{name}", wanted, rule))


def model_tokenizer(section: ModelSection, folder: Path) -> Path | None:
    """The `tokenizer.json` that belongs to `model.load`; None where nothing is loaded.

    Args:
        section: names the weights.
        folder: where the tokenizer of a GGUF file is written (with a `tokenizer_config.json` that names its end token).

    Raises:
        CheckpointError: the model folder has no tokenizer.json, or the GGUF file's tokenizer is of another kind.
    """
    if not section.load:
        return None
    path = locate(section.load)
    if path.suffix == ".gguf":
        write_text(folder / "tokenizer.json", gguf_tokenizer(path))
        write_text(folder / "tokenizer_config.json", gguf_tokenizer_config(path))
        return folder / "tokenizer.json"
    found = path / "tokenizer.json"
    if not found.is_file():
        raise CheckpointError(f"{str(path)!r} has no tokenizer.json: set data.tokenizer.")
    return found
