"""The step: accumulation is exact, a bad step is not taken, groups decay as they should, fp32 masters move."""

from __future__ import annotations

import pytest
import torch

from trimtab.config.sections import OptimSection
from trimtab.models.architecture import Architecture
from trimtab.models.llama import Llama
from trimtab.models.loss import linear_cross_entropy
from trimtab.models.roles import parameter_roles, split_sizes
from trimtab.train.optim import MasterWeights, build_optimizers, materialise_state, optimizer_state
from trimtab.train.step import MicroBatch, train_step

ARCH = Architecture(
    vocab_size=61, dim=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, ffn_dim=64, tie_embeddings=False
)


class Bench:
    """A model with its weights and optimizers."""

    def __init__(self, dtype: torch.dtype = torch.float32, **optim: object) -> None:
        self.model = Llama(ARCH, seed=1)
        roles = parameter_roles(self.model)
        self.weights = MasterWeights(self.model, dtype, roles.__getitem__, lambda name: split_sizes(self.model, name))
        self.optimizers = build_optimizers(self.weights, OptimSection(**optim), fused=True)  # type: ignore[arg-type]

    def loss_sum(self, batch: MicroBatch) -> torch.Tensor:
        hidden = self.model(batch.tokens, batch.positions, batch.segments)
        return linear_cross_entropy(hidden.flatten(0, 1), self.model.head_weight, batch.targets.flatten())

    def step(self, batches: list[MicroBatch], lr_scale: float = 1.0, clip: float = 0.0):  # type: ignore[no-untyped-def]
        num = sum(int((b.targets >= 0).sum()) for b in batches)
        return train_step(self.loss_sum, batches, num, self.weights, self.optimizers, lr_scale, clip)


def batch(rows: int, seed: int = 0, ignored: int = 0) -> MicroBatch:
    x = torch.randint(0, 61, (rows, 17), generator=torch.Generator().manual_seed(seed))
    targets = x[:, 1:].clone()
    targets[0, :ignored] = -100
    return MicroBatch(x[:, :-1], targets)


def parts(whole: MicroBatch, *cuts: int) -> list[MicroBatch]:
    sizes = [*cuts, whole.tokens.shape[0] - sum(cuts)]
    zipped = zip(whole.tokens.split(sizes), whole.targets.split(sizes), strict=True)
    return [MicroBatch(tokens, targets) for tokens, targets in zipped]


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("cuts", [(4,), (1, 2), (1, 1, 1, 1, 1)])
def test_accumulation_gives_the_gradient_of_the_whole_batch(name: str, cuts: tuple[int, ...]) -> None:
    """Also with unequal micro-batches of which one has few targets, where averaging averages goes wrong."""
    whole = batch(8, ignored=15)
    one, many = Bench(name=name), Bench(name=name)
    a, b = one.step([whole]), many.step(parts(whole, *cuts))
    assert a.loss == pytest.approx(b.loss, rel=1e-6)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
    # The first AdamW update is lr times the sign of the gradient: compare the gradients that were handed over.
    for p, q in zip(one.weights.pieces, many.weights.pieces, strict=True):
        assert (p.parameter.grad - q.parameter.grad).abs().max() < 1e-6, p.name  # type: ignore[operator]


def test_bf16_computes_near_fp32_and_moves_fp32_masters() -> None:
    exact, mixed = Bench(), Bench(torch.bfloat16)
    a, b = exact.step([batch(8)]), mixed.step([batch(8)])
    assert a.loss == pytest.approx(b.loss, rel=5e-3)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=5e-2)
    assert all(m.dtype == torch.float32 for m in mixed.weights.masters)
    assert all(p.dtype == torch.bfloat16 for p in mixed.model.parameters())
    for master, param in zip(mixed.weights.masters, mixed.model.parameters(), strict=True):
        assert torch.equal(master.bfloat16(), param)
    assert any(not torch.equal(m.bfloat16().float(), m) for m in mixed.weights.masters), "masters hold more bits"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing(bad: float) -> None:
    bench = Bench()
    bench.step([batch(4)])
    before = [m.clone() for m in bench.weights.masters]
    moments = {
        k: {n: t.clone() for n, t in v.items()} for k, v in optimizer_state(bench.optimizers, bench.weights).items()
    }
    good = bench.loss_sum
    bench.loss_sum = lambda b: good(b) * bad  # type: ignore[method-assign]
    result = bench.step([batch(4, seed=1)])
    assert not result.applied
    assert all(torch.equal(a, b) for a, b in zip(before, bench.weights.masters, strict=True))
    after = optimizer_state(bench.optimizers, bench.weights)
    assert all(torch.equal(t, after[k][n]) for k, v in moments.items() for n, t in v.items())
    bench.loss_sum = good  # type: ignore[method-assign]
    assert bench.step([batch(4, seed=2)]).applied


def test_clipping_scales_to_the_norm() -> None:
    bench = Bench()
    result = bench.step([batch(4)], clip=0.01)
    handed = torch.cat([p.parameter.grad.flatten() for p in bench.weights.pieces])  # type: ignore[union-attr]
    assert result.grad_norm > 0.01
    assert handed.norm().item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_only_hidden_matrices_decay(name: str) -> None:
    """With zero gradients the only motion is decay: lr times weight_decay."""
    bench = Bench(name=name, lr=0.1, muon_lr=0.1, weight_decay=0.5)
    before = [m.clone() for m in bench.weights.masters]
    zero = bench.loss_sum
    bench.loss_sum = lambda b: zero(b) * 0.0  # type: ignore[method-assign]
    bench.step([batch(2)])
    roles = parameter_roles(bench.model)
    for key, old, new in zip(bench.weights.names, before, bench.weights.masters, strict=True):
        factor = 0.95 if roles[key] == "matrix" else 1.0
        assert torch.allclose(new, old * factor, atol=1e-7), key


def test_muon_treats_fused_matrices_one_by_one() -> None:
    """Each piece's first update has singular values near 1 times its shape's factor."""
    bench = Bench(name="muon", muon_lr=1.0, weight_decay=0.0)
    before = [p.parameter.detach().clone() for p in bench.weights.pieces]
    bench.step([batch(8)])
    seen = 0
    for piece, old in zip(bench.weights.pieces, before, strict=True):
        if piece.role == "matrix":
            rows, columns = piece.parameter.shape
            values = torch.linalg.svdvals(old - piece.parameter.detach()) / max(1.0, rows / columns) ** 0.5
            assert 0.5 < values.median() < 1.3, piece.name
            seen += 1
    assert seen == 2 * (3 + 1 + 2 + 1)


def test_learning_rate_is_initial_times_scale() -> None:
    bench = Bench(name="muon", lr=0.3, muon_lr=0.2)
    bench.step([batch(2)], lr_scale=0.25)
    rates = sorted(group["lr"] for optimizer in bench.optimizers for group in optimizer.param_groups)
    assert rates == pytest.approx([0.05, 0.075])


def test_materialised_state_is_what_the_optimizer_would_make() -> None:
    for name in ("adamw", "muon"):
        made, real = Bench(name=name), Bench(name=name)
        materialise_state(made.optimizers, made.weights)
        real.step([batch(2)])
        a, b = optimizer_state(made.optimizers, made.weights), optimizer_state(real.optimizers, real.weights)
        assert {k: {n: (t.shape, t.dtype) for n, t in v.items()} for k, v in a.items()} == {
            k: {n: (t.shape, t.dtype) for n, t in v.items()} for k, v in b.items()
        }


def test_a_small_model_learns_by_heart() -> None:
    bench = Bench(lr=3e-3)
    losses = [bench.step([batch(4)]).loss for _ in range(60)]
    assert losses[-1] < 0.3 * losses[0]
