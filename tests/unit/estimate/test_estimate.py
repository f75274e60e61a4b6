"""FLOPs and bytes against what PyTorch counts and holds."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trimtab.estimate.energy import PowerModel, modelled_energy_j
from trimtab.estimate.flops import forward_flops_per_token, matrix_params, train_flops_per_token
from trimtab.estimate.memory import num_params, training_memory
from trimtab.models.architecture import get_preset
from trimtab.models.llama import Llama


@pytest.mark.parametrize("name", ["llama-1m", "llama-5m"])
def test_forward_flops_agree_with_pytorchs_counter(name: str) -> None:
    shape = get_preset(name).architecture.replace(vocab_size=512)
    model = Llama(shape, seed=0)
    T = 64
    tokens = torch.zeros(2, T, dtype=torch.long)
    counter = FlopCounterMode(display=False)
    with counter:  # with gradients on, attention is taken as batched products, which the counter knows
        model.logits(model(tokens))
    counted = counter.get_total_flops() / tokens.numel()
    # PyTorch counts every key for attention, we count those that causality leaves: (T + 1) / 2 of T.
    products = shape.num_layers * 4.0 * shape.num_heads * shape.head_dim
    full = 2.0 * matrix_params(shape) + products * T
    assert counted == pytest.approx(full, rel=1e-6)
    assert forward_flops_per_token(shape, T) == pytest.approx(full - products * (T - 1) / 2, rel=1e-9)
    assert train_flops_per_token(shape, T) == 3 * forward_flops_per_token(shape, T)


def test_known_sizes() -> None:
    shape = get_preset("llama-3.1-405b").architecture
    assert num_params(shape) == pytest.approx(405.9e9, rel=1e-3)
    assert train_flops_per_token(shape, 8192) == pytest.approx(6 * 405e9, rel=0.08)
    state = training_memory(shape, 8192)
    # bf16 weights and gradients, fp32 masters, gradient sums and two moments: 20 bytes a parameter
    assert state.weights + state.gradients + state.optimizer == pytest.approx(20 * 405.9e9, rel=1e-3)
    less = training_memory(shape, 8192, checkpointing=True)
    assert less.activations < 0.2 * state.activations
    assert training_memory(shape, 8192, optimizer="muon").optimizer < 0.55 * state.optimizer


def test_activations_agree_with_what_autograd_keeps() -> None:
    shape = get_preset("llama-5m").architecture
    model, kept = Llama(shape, seed=0), {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch.nn.Parameter):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    tokens = torch.zeros(2, 1024, dtype=torch.long)  # longer than the batched form takes
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(tokens)
    modelled = training_memory(shape, tokens.numel(), compute_bytes=4).activations
    assert sum(kept.values()) == pytest.approx(modelled, rel=0.35)


def test_energy_between_rest_and_full_load() -> None:
    model = PowerModel.for_device(busy_w=100.0, idle_w=30.0, num_cores=4)
    assert modelled_energy_j(model, 10.0, 0.0) == pytest.approx(300.0)
    assert modelled_energy_j(model, 10.0, 1.0) == pytest.approx(1000.0)
    default = PowerModel.for_device(0.0, 0.0, 4)
    assert modelled_energy_j(default, 1.0, 1.0) == pytest.approx(40.0)
