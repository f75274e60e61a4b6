"""In from and out to Hugging Face folders (`config.json`, safetensors), and any model of theirs behind our interface.

    load_hf(folder)      -> architecture and state dict of our decoder (llama; mistral and qwen3 where they agree)
    save_hf(model, dir)  -> a folder that `transformers.LlamaForCausalLM.from_pretrained` opens, logits equal
    AutoModel(folder)    -> any `AutoModelForCausalLM`, unchanged, that trains through the same step

Only names and fusions differ: their query, key and value matrices stacked are our `qkv`; gate and up stacked are our
`gate_up`. The rotary convention is the same, so no rows are permuted. transformers 5 writes `rope_parameters`, older
versions `rope_theta` and `rope_scaling`: both are read, the older form (which all versions read) is written.

Rejected: reading weights through transformers (it builds the model twice, and needs the package). Limits: export is one
file; biases, sliding windows and other rope types are refused by name rather than ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from trimtab.core.atomic import atomic_path, write_text
from trimtab.core.errors import CheckpointError, nearest
from trimtab.core.optional import need
from trimtab.models.architecture import Architecture
from trimtab.models.llama import Llama, segment_mask

SUPPORTED = ("llama", "mistral", "qwen3")
"""`model_type`s that are our decoder under other names."""
_LAYER_NAMES = {
    "attention_norm.weight": ("input_layernorm.weight",),
    "attention.qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attention.output.weight": ("self_attn.o_proj.weight",),
    "attention.query_norm.weight": ("self_attn.q_norm.weight",),
    "attention.key_norm.weight": ("self_attn.k_norm.weight",),
    "feed_forward_norm.weight": ("post_attention_layernorm.weight",),
    "feed_forward.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "feed_forward.down.weight": ("mlp.down_proj.weight",),
}
_PROBE_TOKENS = 8


def their_names(name: str) -> tuple[str, ...]:
    """Names, in a Hugging Face folder, of the tensors that our parameter `name` is made of, stacked in this order."""
    ends = {
        "embedding.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    if name in ends:
        return (ends[name],)
    _, index, rest = name.split(".", 2)
    return tuple(f"model.layers.{index}.{part}" for part in _LAYER_NAMES[rest])


def fuse(theirs: Mapping[str, Tensor], arch: Architecture, where: str) -> dict[str, Tensor]:
    """Our state dict (fp32) from theirs.

    Raises:
        CheckpointError: a tensor is missing, left over, or of another shape; the message names it.
    """
    unused = {name for name in theirs if not name.endswith("rotary_emb.inv_freq")}
    ours = {}
    for name, parameter in Llama(arch, device="meta").named_parameters():
        names = their_names(name)
        if missing := [part for part in names if part not in theirs]:
            raise CheckpointError(f"{where} has no tensor {missing[0]!r}: the file is incomplete, fetch it again.")
        unused.difference_update(names)
        ours[name] = torch.cat([theirs[part].float() for part in names])
        if ours[name].shape != parameter.shape:
            found, wanted = tuple(ours[name].shape), tuple(parameter.shape)
            raise CheckpointError(
                f"{where}: {' + '.join(names)} has shape {found}, its configuration asks for {wanted}."
            )
    if arch.tie_embeddings:
        unused.discard("lm_head.weight")
    if unused:
        raise CheckpointError(
            f"{where} holds tensors that a plain decoder has no place for: {', '.join(sorted(unused)[:3])}."
        )
    return ours


def unfuse(model: Llama, state: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Their state dict from ours (from `state`, such as fp32 masters by parameter name, or the model's own weights)."""
    source = state if state is not None else dict(model.named_parameters())
    theirs = {}
    for name, parameter in model.named_parameters():
        names = their_names(name)
        sizes = model.split_sizes(name) or (parameter.shape[0],)
        for part, tensor in zip(names, source[name].detach().cpu().split(sizes), strict=True):
            theirs[part] = tensor.clone().contiguous()
    return theirs


def _refuse(where: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{str(where)!r} {what}: set model.family = 'auto' to train it through transformers.")


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a model folder.

    Raises:
        CheckpointError: there is none, or it is not JSON.
    """
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{str(folder)!r} is not a Hugging Face model folder: it has no config.json.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read ({error}).") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{str(path)!r} must be a JSON object.")
    return content


def architecture_from_config(config: Mapping[str, Any], where: Path) -> Architecture:
    """Our architecture from their `config.json`.

    Raises:
        CheckpointError: another kind of model, or one with a part that our decoder does not have.
    """
    kind = str(config.get("model_type", ""))
    if kind not in SUPPORTED:
        near = nearest(kind, SUPPORTED)
        hint = f" (nearest: {near})" if near else ""
        raise _refuse(where, f"is of model_type {kind!r}, and trimtab's decoder loads {', '.join(SUPPORTED)}{hint}")
    if config.get("hidden_act", "silu") != "silu":
        raise _refuse(where, f"has the activation {config['hidden_act']!r}, not silu")
    for flag in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if config.get(flag):
            raise _refuse(where, f"has {flag}, which trimtab's decoder does not")
    longest = int(config.get("max_position_embeddings", 2048))
    window = config.get("sliding_window", 4096) if kind == "mistral" else None
    if window is not None and window < longest:
        raise _refuse(where, f"has a sliding window of {window} tokens, which trimtab's decoder does not")
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", None) or config.get("rope_theta", 10_000.0)
    rope_type = rope.pop("rope_type", rope.pop("type", "default"))
    if rope_type not in ("default", "llama3"):
        raise _refuse(where, f"has rope scaling of type {rope_type!r}, not llama3")
    try:
        heads, dim = int(config["num_attention_heads"]), int(config["hidden_size"])
        return Architecture(
            vocab_size=int(config["vocab_size"]),
            dim=dim,
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or dim // heads),
            ffn_dim=int(config["intermediate_size"]),
            qk_norm=kind == "qwen3",
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            rope_theta=float(theta),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_sequence_length=longest,
            rope_scaling=rope if rope_type == "llama3" else None,
            init_std=float(config.get("initializer_range", 0.02)),
        )
    except KeyError as error:
        raise CheckpointError(f"{str(where)!r}: config.json has no {error.args[0]!r}.") from None


def config_from_architecture(arch: Architecture, dtype: torch.dtype) -> dict[str, Any]:
    """Their `config.json` (as a dict) for our architecture; with QK-norm it is a qwen3.

    Raises:
        CheckpointError: transformers has no class for it (ReLU^2).
    """
    if arch.activation != "swiglu":
        raise CheckpointError(
            f"Export to the Hugging Face layout needs model.activation = 'swiglu', not {arch.activation!r}."
        )
    kind, cls = ("qwen3", "Qwen3ForCausalLM") if arch.qk_norm else ("llama", "LlamaForCausalLM")
    scaling = None if arch.rope_scaling is None else {"rope_type": "llama3", **arch.rope_scaling}
    return {
        "architectures": [cls],
        "model_type": kind,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.dim,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "intermediate_size": arch.ffn_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": arch.tie_embeddings,
        "rope_theta": arch.rope_theta,
        "rope_scaling": scaling,
        "rms_norm_eps": arch.norm_eps,
        "max_position_embeddings": arch.max_sequence_length,
        "initializer_range": arch.init_std,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def load_hf(folder: Path) -> tuple[Architecture, dict[str, Tensor]]:
    """Architecture and fp32 state dict of our decoder, from a Hugging Face folder (one safetensors file or several).

    Raises:
        CheckpointError: the folder is incomplete, damaged, or of a kind that our decoder is not.
    """
    arch = architecture_from_config(read_config(folder), folder)
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        files = sorted({folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    else:
        files = [single]
    theirs: dict[str, Tensor] = {}
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{str(folder)!r} has no {file.name}: weights must be in safetensors.")
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 (it is not a dict)
                    theirs[name] = handle.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{str(file)!r} is damaged ({error}): fetch it again.") from None
    return arch, fuse(theirs, arch, repr(str(folder)))


def save_hf(
    model: Llama, folder: Path, dtype: torch.dtype = torch.float32, state: Mapping[str, Tensor] | None = None
) -> None:
    """Write `config.json` and `model.safetensors`; each is complete or absent, the configuration comes last.

    Args:
        model: ours.
        folder: made if need be.
        dtype: of the tensors written.
        state: weights by our parameter names, such as fp32 masters; None: the model's own.

    Raises:
        CheckpointError: the architecture has no Hugging Face class.
        StorageError: the folder cannot be written.
    """
    config = config_from_architecture(model.arch, dtype)
    tensors = {name: tensor.to(dtype) for name, tensor in unfuse(model, state).items()}
    with atomic_path(folder / "model.safetensors") as path:
        save_file(tensors, path, metadata={"format": "pt"})
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


class AutoModel(nn.Module):
    """Any `AutoModelForCausalLM` folder behind our interface: `forward` to hidden states, `head_weight`, `logits`.

    Nothing is fetched from the network. On loading, a few tokens check that its logits really are the head times the
    last hidden state; a model that caps, scales or shifts them is refused, since the loss would be another one.

    Args:
        folder: local model folder.
        max_sequence_length: of the run; taken where the configuration states none.

    Raises:
        CheckpointError: transformers cannot open it, or its logits are not a plain product.
    """

    def __init__(self, folder: Path, max_sequence_length: int = 2048) -> None:
        super().__init__()
        transformers = need("transformers", "hf", "model.family = 'auto'")
        try:
            self.inner = transformers.AutoModelForCausalLM.from_pretrained(
                str(folder), local_files_only=True, dtype=torch.float32, attn_implementation="sdpa"
            )
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(f"transformers cannot open {str(folder)!r}: {str(error).splitlines()[0]}") from None
        config = self.inner.config.get_text_config()
        self.arch = _described(config, self.head_weight, max_sequence_length)
        probe = torch.arange(_PROBE_TOKENS)[None] % self.arch.vocab_size
        with torch.no_grad():
            self.inner.eval()
            difference = (self.inner(probe).logits - self.logits(self(probe))).abs().max().item()
        if not difference < 1e-3:
            raise CheckpointError(
                f"{str(folder)!r}: its logits are not its head times its last hidden state (they differ by "
                f"{difference:.3g}), so trimtab's loss would be another one; use a model without capped logits."
            )
        self.inner.train()

    def forward(self, tokens: Tensor, positions: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        """Last hidden states [B, T, D]; arguments [B, T] as in `Llama.forward`."""
        mask = None if segments is None else segment_mask(segments)
        base = self.inner.base_model
        out = base(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False)
        hidden: Tensor = out.last_hidden_state
        return hidden

    def set_activation_checkpointing(self, on: bool) -> None:
        """Turn recomputation on or off."""
        if on:
            self.inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.inner.gradient_checkpointing_disable()

    @property
    def head_weight(self) -> Tensor:
        """Weight of the output head, [V, D]."""
        weight: Tensor = self.inner.get_output_embeddings().weight
        return weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., D] -> logits [..., V]."""
        return nn.functional.linear(hidden, self.head_weight)


def _described(config: Any, head: Tensor, max_sequence_length: int) -> Architecture:
    """The nearest `Architecture` to a foreign configuration: for FLOP and memory figures, not for building."""
    dim, heads = int(head.shape[1]), int(getattr(config, "num_attention_heads", 1))
    ffn_dim = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * dim
    is_gated = "gelu_new" not in str(getattr(config, "activation_function", getattr(config, "hidden_act", "")))
    return Architecture(
        vocab_size=int(head.shape[0]),
        dim=dim,
        num_layers=int(getattr(config, "num_hidden_layers", 1)),
        num_heads=heads,
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=2 * max(1, int(getattr(config, "head_dim", None) or dim // heads) // 2),
        ffn_dim=int(ffn_dim),
        activation="swiglu" if is_gated else "relu2",
        tie_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        max_sequence_length=int(getattr(config, "max_position_embeddings", None) or max_sequence_length),
    )
