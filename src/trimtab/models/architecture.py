"""The shape of a decoder, without torch: what it is made of, how many parameters, and the presets.

An `Architecture` is plain numbers, so a laptop without torch plans a 405B run from the very object that builds the
model on the cluster. Presets are data (`presets.toml`: each with its source and date), never code.

`resolve` turns the configuration into an architecture: a preset, changed field by field. When `model.dim` is changed
and heads or feed-forward width are not, these follow the new width (heads keep the preset's head size, the
feed-forward layer keeps the preset's ratio, rounded to 64 features: the tile of AMX and of tensor cores).

Rejected: a depth knob from which all else is derived (nanochat); public architectures do not lie on one such line.
Limits: dense decoders only. No sliding-window attention, no mixture of experts, no biases.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from trimtab.config.sections import ModelSection
from trimtab.core.errors import ConfigError, nearest, refusal

_AUTO = ((5e12, "llama-5m"), (5e13, "llama-30m"), (5e14, "llama-100m"), (float("inf"), "llama-300m"))
"""Preset for `auto` by the machine's GEMM rate (FLOP/s): the largest of our ladder that falls well under 3 nats per
token on the default corpus in about three minutes. Two server cores measure 0.3e12 (AVX512) to 2.3e12 (AMX) in bf16,
an H200 about 7e14."""
_ROPE_SCALING_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_FEATURE_TILE = 64


@dataclass(frozen=True)
class Architecture:
    """A Llama-family decoder in numbers. Built once, never changed; checks itself when made."""

    vocab_size: int
    """Rows of the embedding (tokens)."""
    dim: int
    """Width of the residual stream (features)."""
    num_layers: int
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; fewer than query heads is grouped-query attention (Ainslie et al., arXiv 2305.13245)."""
    head_dim: int
    """Features per head; even, since rotary embedding turns pairs."""
    ffn_dim: int
    """Width of the feed-forward layer (features)."""
    activation: str = "swiglu"
    """`swiglu` (Shazeer, arXiv 2002.05202; three matrices) or `relu2` (So et al., arXiv 2109.08668; two)."""
    qk_norm: bool = False
    """RMS-normalise queries and keys per head (Henry et al., arXiv 2010.04245)."""
    tie_embeddings: bool = True
    """The output head is the embedding (Press & Wolf, arXiv 1608.05859)."""
    rope_theta: float = 10_000.0
    """Base of the rotary position embedding (Su et al., arXiv 2104.09864)."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    max_sequence_length: int = 2048
    """Longest sequence, and the length of the rotary tables (tokens)."""
    rope_scaling: dict[str, Any] | None = None
    """Llama-3 frequency scaling: factor, low_freq_factor, high_freq_factor, original_max_position_embeddings."""
    init_std: float = 0.02
    """Standard deviation of initial weights; residual projections get it over sqrt(2 num_layers)."""

    def __post_init__(self) -> None:
        counts = ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_dim")
        for name in (*counts, "max_sequence_length"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(refusal(f"model.{name}", value, "must be a whole number of at least 1"))
        if self.num_heads % self.num_kv_heads:
            divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            near = min(divisors, key=lambda n: abs(n - self.num_kv_heads))
            rule = f"must divide model.num_heads = {self.num_heads}"
            raise ConfigError(refusal("model.num_kv_heads", self.num_kv_heads, rule, f"try {near}"))
        if self.head_dim % 2:
            rule = "must be even (rotary embedding turns pairs)"
            fix = f"choose model.dim and model.num_heads so that it is {self.head_dim + 1}"
            raise ConfigError(refusal("model.head_dim", self.head_dim, rule, fix))
        if self.activation not in ("swiglu", "relu2"):
            hint = f"did you mean {nearest(self.activation, ('swiglu', 'relu2')) or 'swiglu'!r}"
            raise ConfigError(refusal("model.activation", self.activation, "must be swiglu or relu2", hint))
        for name in ("rope_theta", "norm_eps", "init_std"):
            number = getattr(self, name)
            if not 0.0 < number < float("inf"):
                raise ConfigError(refusal(f"model.{name}", number, "must be a finite number above 0"))
        if self.rope_scaling is not None:
            self._check_rope_scaling(self.rope_scaling)

    @staticmethod
    def _check_rope_scaling(scaling: dict[str, Any]) -> None:
        missing = [key for key in _ROPE_SCALING_KEYS if not scaling.get(key, 0) > 0]
        if missing:
            rule = f"must have {', '.join(missing)} above 0 (Llama-3 scaling)"
            raise ConfigError(refusal("model.rope_scaling", scaling, rule))
        if not scaling["high_freq_factor"] > scaling["low_freq_factor"]:
            rule = "must have high_freq_factor above low_freq_factor"
            raise ConfigError(refusal("model.rope_scaling", scaling, rule))

    def num_params_per_layer(self) -> int:
        """Parameters of one block: attention, feed-forward and their norms."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.dim * (2 * queries + 2 * keys) + (2 * self.head_dim if self.qk_norm else 0)
        feed_forward = self.dim * self.ffn_dim * (3 if self.activation == "swiglu" else 2)
        return attention + feed_forward + 2 * self.dim

    def num_params_non_embedding(self) -> int:
        """Parameters of the blocks and the final norm: neither the embedding nor an untied head."""
        return self.num_layers * self.num_params_per_layer() + self.dim

    def num_params(self) -> int:
        """All parameters; a tied embedding counts once."""
        tables = 1 if self.tie_embeddings else 2
        return self.num_params_non_embedding() + tables * self.vocab_size * self.dim

    def replace(self, **changes: Any) -> Architecture:
        """A copy with fields changed, checked again."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Preset:
    """A named architecture and where it is published."""

    name: str
    architecture: Architecture
    source: str
    """URL of the published configuration, or the reason for one of our own."""
    date: str
    """Day the source was published (ISO 8601)."""
    published_params: int
    """Parameter count that the source states; 0: one of our own, nothing is published."""


@functools.cache
def catalog() -> dict[str, Preset]:
    """All presets with their sources, by name, in the order of `presets.toml`."""
    text = resources.files("trimtab.models").joinpath("presets.toml").read_text(encoding="utf-8")
    found = {}
    for name, entry in tomllib.loads(text).items():
        about = {key: entry.pop(key) for key in ("source", "date")}
        published = entry.pop("published_params", 0)
        entry.setdefault("num_kv_heads", entry["num_heads"])
        entry.setdefault("head_dim", entry["dim"] // entry["num_heads"])
        found[name] = Preset(name, Architecture(**entry), published_params=published, **about)
    return found


def presets() -> dict[str, Architecture]:
    """All presets by name, from the smallest to the largest in each family."""
    return {name: preset.architecture for name, preset in catalog().items()}


def get_preset(name: str) -> Preset:
    """The preset called `name`.

    Raises:
        ConfigError: there is none; the message names the nearest and lists all.
    """
    known = catalog()
    if name not in known:
        near = nearest(name, known)
        hint = f"did you mean {near!r}" if near else "choose one of them"
        raise ConfigError(refusal("model.preset", name, f"must be auto or one of {', '.join(known)}", hint))
    return known[name]


def auto_preset(peak_flops: float = 0.0) -> str:
    """Name of the preset sized to a machine of this GEMM rate (FLOP/s; 0: not known, taken for a CPU box)."""
    return next(name for limit, name in _AUTO if peak_flops < limit)


def resolve(
    section: ModelSection, vocab_size: int = 0, peak_flops: float = 0.0, max_sequence_length: int = 0
) -> Architecture:
    """The architecture that the configuration asks for.

    Args:
        section: preset and the fields that change it.
        vocab_size: of the run's tokenizer; 0: the preset's.
        peak_flops: the machine's GEMM rate (FLOP/s), for `auto`; 0: taken for a CPU box.
        max_sequence_length: of the run; the rotary tables are made at least this long (tokens).

    Raises:
        ConfigError: an unknown preset (the nearest is named), or fields that do not go together.
    """
    name = auto_preset(peak_flops) if section.preset == "auto" else section.preset
    base = get_preset(name).architecture
    changes: dict[str, Any] = {"init_std": section.init_std}
    if vocab_size:
        changes["vocab_size"] = vocab_size
    if max_sequence_length:
        changes["max_sequence_length"] = max(max_sequence_length, base.max_sequence_length)
    for field in ("num_layers", "ffn_dim", "activation", "rope_theta"):
        if value := getattr(section, field):
            changes[field] = value
    for field in ("qk_norm", "tie_embeddings"):
        if value := getattr(section, field):
            changes[field] = value == "yes"
    return base.replace(**changes, **_resolve_width(section, base))


def _resolve_width(section: ModelSection, base: Architecture) -> dict[str, int]:
    """Width, heads, head size and feed-forward width, where any of them is changed."""
    dim = section.dim or base.dim
    changes: dict[str, int] = {"dim": dim}
    num_heads = section.num_heads
    if not num_heads:
        num_heads = base.num_heads if dim == base.dim else max(1, dim // base.head_dim)
    if dim != base.dim or num_heads != base.num_heads:
        if dim % num_heads:
            near = min((n for n in range(1, dim + 1) if dim % n == 0), key=lambda n: abs(n - num_heads))
            raise ConfigError(refusal("model.num_heads", num_heads, f"must divide model.dim = {dim}", f"try {near}"))
        changes["head_dim"] = dim // num_heads
        group = base.num_heads // base.num_kv_heads
        follows = num_heads // group if num_heads % group == 0 else num_heads
        changes.update(num_heads=num_heads, num_kv_heads=follows)
    if section.num_kv_heads:
        changes["num_kv_heads"] = section.num_kv_heads
    if dim != base.dim and not section.ffn_dim:
        exact = base.ffn_dim * dim / base.dim
        changes["ffn_dim"] = max(_FEATURE_TILE, round(exact / _FEATURE_TILE) * _FEATURE_TILE)
    return changes
