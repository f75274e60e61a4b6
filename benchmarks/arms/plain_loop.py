"""Arm (b): what a nanoGPT user writes: one file, autocast to bf16, fused AdamW, cosine; compiled if asked."""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch
from common import BATCH_SEQUENCES, SHAPES, VOCAB_SIZE, Clock, Settings, windows
from torch import Tensor, nn
from torch.nn import functional as F


def rope(x: Tensor) -> Tensor:
    """Rotary embedding of [B, H, T, K]."""
    length, width = x.shape[-2:]
    frequency = 10000.0 ** (-torch.arange(0, width, 2, device=x.device) / width)
    angle = torch.outer(torch.arange(length, device=x.device), frequency)
    cos, sin = angle.cos(), angle.sin()
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Block(nn.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, dim: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate, self.up = nn.Linear(dim, ffn, bias=False), nn.Linear(dim, ffn, bias=False)
        self.down = nn.Linear(ffn, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(rope(q), rope(k), v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, D))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """Embedding, blocks, tied head."""

    def __init__(self, dim: int, layers: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, ffn) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                std = 0.02 / math.sqrt(2 * layers) if name.endswith(("proj.weight", "down.weight")) else 0.02
                nn.init.normal_(parameter, 0.0, std)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def run(settings: Settings) -> None:
    """Train one model and print the result line."""
    torch.manual_seed(settings.seed)
    shape = SHAPES[settings.dim]
    model = Model(shape["dim"], shape["num_layers"], shape["num_heads"], shape["ffn_dim"])
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True)
    forward = torch.compile(model) if settings.compiled else model
    folder = Path(settings.corpus)
    train, val = windows(folder / "train.npy"), windows(folder / "val.npy")[: settings.val_windows]
    generator = torch.Generator().manual_seed(settings.seed)
    order = torch.randperm(train.shape[0], generator=generator)
    warmup = max(1, settings.steps // 20)

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return forward(tokens, targets)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        index = order[torch.arange(step * BATCH_SEQUENCES, (step + 1) * BATCH_SEQUENCES) % order.shape[0]]
        rows = train[index]
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    clock = Clock(settings, loss_of, val)
    if settings.compiled:  # on real shapes before the clock starts; the gradients are thrown away
        began = time.perf_counter()
        tokens, targets = batch(0)
        (loss_of(tokens, targets) / targets.numel()).backward()
        optimizer.zero_grad()
        with torch.no_grad():
            loss_of(tokens, targets)
        clock.setup_s = time.perf_counter() - began
    for step in range(settings.steps):
        clock.wait_for_turn()
        clock.start()
        progress = max(0.0, (step - warmup) / max(1, settings.steps - warmup))
        scale = (step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * scale
        tokens, targets = batch(step)
        loss = loss_of(tokens, targets) / targets.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        clock.stop()
    clock.print_result()
