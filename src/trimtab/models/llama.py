"""A Llama-family decoder, read top to bottom.

    tokens -> embedding -> [x + attention(norm(x)) -> x + feed_forward(norm(x))] x num_layers -> norm -> hidden
    hidden @ head_weight.T -> logits

Pre-norm with RMSNorm (Zhang & Sennrich, arXiv 1910.07467), rotary positions (Su et al., arXiv 2104.09864), grouped
queries (Ainslie et al., arXiv 2305.13245), SwiGLU (Shazeer, arXiv 2002.05202) or ReLU^2 (So et al., arXiv 2109.08668),
optional QK-norm (Henry et al., arXiv 2010.04245), no biases.

What is not like the usual listing: query, key and value are one matrix, gate and up are one matrix (fewer and larger
products; the backward of the norm's output is one product instead of three and a sum). `split_sizes` tells an
optimizer where the seams are. `forward` stops at the hidden states: the loss (`models.loss`) takes the head's product
in pieces, so that logits of a whole batch never exist.

Rotary embedding turns the first half of a head against the second (the Hugging Face convention), so that their weights
load without permutation. Its tables are fp32 buffers outside the state dict, cast once per forward.

Initial weights are drawn on the CPU from one seed, so they are the same on every device: normal with `init_std`, the
two projections that write into the residual stream with init_std / sqrt(2 num_layers) (GPT-2, Radford et al. 2019).

Rejected: a configuration object with a hundred switches; separate classes per vendor's model. Limits: dense, causal,
no sliding window, no dropout (none of the presets trains with it).

Shapes: B batch, T sequence, S keys seen (T, or more with a cache), D dim, H query heads, G key/value heads,
K head dim, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from trimtab.core.errors import ConfigError, refusal
from trimtab.models.architecture import Architecture
from trimtab.models.attention import attention, causal_bias, prefers_batched


class LayerCache(Protocol):
    """Keys and values of the tokens before this forward, for one layer (see `models.generate`)."""

    def extend(self, keys_BTGK: Tensor, values_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        """Append to the cache; returns all keys and values so far, each [B, S, G, K]."""
        ...


class Visibility(NamedTuple):
    """Which tokens a token may look at, in the form that `models.attention` takes."""

    mask: Tensor | None
    is_causal: bool
    bias: Tensor | None


class Linear(nn.Linear):
    """A product without bias whose weight is left as allocated: `Llama.reset_parameters` or a load fills it.

    (`nn.Linear` would draw a throw-away weight from the global generator, slowly for large models.)
    """

    def __init__(self, in_features: int, out_features: int, device: torch.device | str | None = None) -> None:
        super().__init__(in_features, out_features, bias=False, device=device)

    def reset_parameters(self) -> None:
        """Nothing: see the class."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def __init__(self, dim: int, eps: float, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as `x`."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rope_frequencies(arch: Architecture) -> Tensor:
    """Angle per position of each of the K/2 rotary pairs, fp32 [K/2].

    With `rope_scaling`, wavelengths longer than the original context are stretched by `factor`, short ones are left,
    and those between are blended (Llama 3.1, as in `transformers.modeling_rope_utils._compute_llama3_parameters`).
    """
    exponent = torch.arange(0, arch.head_dim, 2, dtype=torch.int64).float() / arch.head_dim
    frequency = 1.0 / (arch.rope_theta**exponent)
    if arch.rope_scaling is None:
        return frequency
    factor, low, high = (float(arch.rope_scaling[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(arch.rope_scaling["original_max_position_embeddings"])
    turns = original * frequency / (2 * math.pi)  # turns within the original context
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - blend) * frequency / factor + blend * frequency


def rope_tables(arch: Architecture) -> tuple[Tensor, Tensor]:
    """Cosines and sines, fp32 [max_sequence_length, K/2] each."""
    position = torch.arange(arch.max_sequence_length, dtype=torch.int64).float()
    angle = torch.outer(position, rope_frequencies(arch))
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the halves of each head against each other by the position's angle.

    Args:
        x: [B, T, H, K].
        cos, sin: [B or 1, T, 1, K/2], in the type of `x`.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def segment_mask(segments_BT: Tensor) -> Tensor:
    """Block-causal mask [B, 1, T, T] of packed documents: True where a token may look."""
    length = segments_BT.shape[1]
    same = segments_BT[:, :, None] == segments_BT[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments_BT.device).tril()
    return (same & causal)[:, None]


class Attention(nn.Module):
    """Causal self-attention with one fused projection for query, key and value."""

    def __init__(self, arch: Architecture, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = arch.num_heads, arch.num_kv_heads, arch.head_dim
        fused = (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim
        self.qkv = Linear(arch.dim, fused, device)
        self.output = Linear(arch.num_heads * arch.head_dim, arch.dim, device)
        self.query_norm = RMSNorm(arch.head_dim, arch.norm_eps, device) if arch.qk_norm else None
        self.key_norm = RMSNorm(arch.head_dim, arch.norm_eps, device) if arch.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Visibility, cache: LayerCache | None = None) -> Tensor:
        """`x` [B, T, D] -> [B, T, D]."""
        B, T, _ = x.shape
        num_qk = self.num_heads + self.num_kv_heads
        qkv = self.qkv(x).view(B, T, num_qk + self.num_kv_heads, self.head_dim)
        qk, v = qkv.split((num_qk, self.num_kv_heads), dim=2)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = qk.split((self.num_heads, self.num_kv_heads), dim=2)
            qk = torch.cat((self.query_norm(q), self.key_norm(k)), dim=2)
        q, k = rotate(qk, cos, sin).split((self.num_heads, self.num_kv_heads), dim=2)
        if cache is not None:
            k, v = cache.extend(k, v)
        return self.output(attention(q, k, v, seen.mask, seen.is_causal, seen.bias))


class FeedForward(nn.Module):
    """SwiGLU with one fused projection for gate and up, or ReLU^2."""

    def __init__(self, arch: Architecture, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.is_gated = arch.activation == "swiglu"
        if self.is_gated:
            self.gate_up = Linear(arch.dim, 2 * arch.ffn_dim, device)
        else:
            self.up = Linear(arch.dim, arch.ffn_dim, device)
        self.down = Linear(arch.ffn_dim, arch.dim, device)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [B, T, D] -> [B, T, D]."""
        if self.is_gated:
            gate, up = self.gate_up(x).chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    """One pre-norm layer."""

    def __init__(self, arch: Architecture, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(arch.dim, arch.norm_eps, device)
        self.attention = Attention(arch, device)
        self.feed_forward_norm = RMSNorm(arch.dim, arch.norm_eps, device)
        self.feed_forward = FeedForward(arch, device)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Visibility, cache: LayerCache | None = None) -> Tensor:
        """`x` [B, T, D] -> [B, T, D]."""
        x = x + self.attention(self.attention_norm(x), cos, sin, seen, cache)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """The decoder.

    Args:
        arch: its shape.
        device: where the weights live; `"meta"` builds names and shapes without memory.
        seed: of the initial weights; None leaves them as PyTorch allocates them (to be loaded over).
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, arch: Architecture, device: torch.device | str = "cpu", seed: int | None = 0) -> None:
        super().__init__()
        self.arch = arch
        self.activation_checkpointing = False
        """Recompute each block in backward (Chen et al., arXiv 1604.06174)."""
        self.embedding = nn.Embedding.from_pretrained(
            torch.empty(arch.vocab_size, arch.dim, device=device), freeze=False
        )
        self.layers = nn.ModuleList(Block(arch, device) for _ in range(arch.num_layers))
        self.norm = RMSNorm(arch.dim, arch.norm_eps, device)
        self.head = None if arch.tie_embeddings else Linear(arch.dim, arch.vocab_size, device)
        for name in ("cos", "sin"):
            shape = (arch.max_sequence_length, arch.head_dim // 2)
            self.register_buffer(name, torch.empty(shape, device=device, dtype=torch.float32), persistent=False)
        if torch.device(device).type != "meta":
            self.reset_tables()
            if seed is not None:
                self.reset_parameters(seed)

    def reset_tables(self) -> None:
        """Fill the rotary tables (needed after `to_empty`, since buffers outside the state dict are not loaded)."""
        for buffer, table in zip((self.cos, self.sin), rope_tables(self.arch), strict=True):
            buffer.copy_(table)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Draw all weights anew from `seed`, on the CPU: the same numbers on every device."""
        generator = torch.Generator().manual_seed(seed)
        residual_std = self.arch.init_std / math.sqrt(2 * self.arch.num_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0)
                continue
            writes_residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
            std = residual_std if writes_residual else self.arch.init_std
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        caches: Sequence[LayerCache] | None = None,
        start: int = 0,
    ) -> Tensor:
        """Hidden states after the final norm.

        Args:
            tokens: [B, T].
            positions: [B, T], each token's place in its document; None: start, start + 1, ...
            segments: [B, T], document number of each token, for packed sequences; None: one document a row.
            caches: one per layer, for generation; they already hold `start` tokens.
            start: position of the first token when `positions` is None.

        Returns:
            [B, T, D].

        Raises:
            ConfigError: the sequence is longer than the rotary tables.
        """
        T = tokens.shape[1]
        limit = self.arch.max_sequence_length
        if start + T > limit:
            fix = "shorten data.sequence_length, or build the model with a larger max_sequence_length"
            raise ConfigError(refusal("sequence length", start + T, f"must be at most {limit} for this model", fix))
        x = self.embedding(tokens)
        if positions is None:
            cos, sin = self.cos[start : start + T][None, :, None], self.sin[start : start + T][None, :, None]
        else:
            cos, sin = self.cos[positions][:, :, None], self.sin[positions][:, :, None]
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        mask = None if segments is None else segment_mask(segments)
        if mask is None and start > 0 and T > 1:  # a chunk after a cached prefix
            mask = torch.ones(T, start + T, dtype=torch.bool, device=x.device).tril(start)
        batched = caches is None and prefers_batched(x)
        bias = causal_bias(T, mask, x) if batched else None
        seen = Visibility(mask, is_causal=mask is None and start == 0, bias=bias)
        for index, block in enumerate(self.layers):
            cache = caches[index] if caches is not None else None
            if self.activation_checkpointing and cache is None and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, seen, use_reentrant=False)
            else:
                x = block(x, cos, sin, seen, cache)
        return self.norm(x)

    def set_activation_checkpointing(self, on: bool) -> None:
        """Turn recomputation of blocks in backward on or off."""
        self.activation_checkpointing = on

    @property
    def head_weight(self) -> Tensor:
        """Weight of the output head, [V, D]; the embedding itself when tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., D] -> logits [..., V]. For generation; the loss never calls it."""
        return F.linear(hidden, self.head_weight)

    def split_sizes(self, name: str) -> tuple[int, ...]:
        """Row counts of the matrices fused in parameter `name`, in order; empty where it is a single one."""
        if name.endswith("attention.qkv.weight"):
            keys = self.arch.num_kv_heads * self.arch.head_dim
            return (self.arch.num_heads * self.arch.head_dim, keys, keys)
        if name.endswith("feed_forward.gate_up.weight"):
            return (self.arch.ffn_dim, self.arch.ffn_dim)
        return ()
