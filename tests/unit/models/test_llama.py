"""The decoder against references: transformers' logits, plain attention, plain cross-entropy, documents one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from trimtab.config.sections import ModelSection
from trimtab.core.errors import CheckpointError, ConfigError
from trimtab.models.architecture import Architecture, catalog, get_preset, resolve
from trimtab.models.attention import attention, causal_bias
from trimtab.models.build import build_model
from trimtab.models.generate import generate
from trimtab.models.hf import AutoModel, load_hf, save_hf
from trimtab.models.llama import Llama, segment_mask
from trimtab.models.loss import linear_cross_entropy
from trimtab.models.roles import parameter_roles, split_sizes

SMALL = {"vocab_size": 97, "dim": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn_dim": 80}


def arch(**changes: object) -> Architecture:
    return Architecture(**{**SMALL, **changes})  # type: ignore[arg-type]


VARIANTS = {
    "plain": arch(num_kv_heads=4, head_dim=12),
    "grouped": arch(),
    "untied": arch(tie_embeddings=False),
    "qk_norm": arch(qk_norm=True, tie_embeddings=False),
    "llama3_rope": arch(
        rope_theta=500000.0,
        max_sequence_length=256,
        rope_scaling={
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
}


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", VARIANTS)
def test_export_opens_in_transformers_with_equal_logits(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = Llama(VARIANTS[name], seed=1)
    save_hf(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert type(theirs).__name__ == ("Qwen3ForCausalLM" if name == "qk_norm" else "LlamaForCausalLM")
    x = tokens(2, 70)
    with torch.no_grad():
        ours, reference = model.logits(model(x)), theirs(x).logits
    assert (ours - reference).abs().max() < 1e-5


def test_import_of_their_weights_gives_equal_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        rope_theta=12345.0,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    found, state = load_hf(tmp_path)
    model = Llama(found, seed=None)
    model.load_state_dict(state)
    x = tokens(2, 100)
    with torch.no_grad():
        assert (model.logits(model(x)) - theirs(x).logits).abs().max() < 1e-5
    again = tmp_path / "again"
    save_hf(model, again)
    back = load_hf(again)[1]
    assert all(torch.equal(back[key], state[key]) for key in state)


def test_any_auto_model_trains_through_our_interface(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=97, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path)
    model = AutoModel(tmp_path, 64)
    x = tokens(2, 33)
    hidden = model(x[:, :-1])
    loss = linear_cross_entropy(hidden.flatten(0, 1), model.head_weight, x[:, 1:].flatten())
    loss.backward()
    model.eval()
    expected = F.cross_entropy(theirs(x[:, :-1]).logits.flatten(0, 1), x[:, 1:].flatten(), reduction="sum")
    model.train()
    assert all(p.grad is not None for p in model.parameters())
    with torch.no_grad():
        model.eval()
        evaluated = linear_cross_entropy(model(x[:, :-1]).flatten(0, 1), model.head_weight, x[:, 1:].flatten())
    assert abs(evaluated.item() - expected.item()) < 1e-2


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("packed", [False, True])
def test_batched_attention_equals_pytorchs(heads: tuple[int, int], packed: bool) -> None:
    torch.manual_seed(0)
    H, G = heads
    B, T, K = 3, 24, 16
    q, k, v = (torch.randn(B, T, n, K, requires_grad=True) for n in (H, G, G))
    mask = segment_mask(torch.arange(T).div(7, rounding_mode="floor").repeat(B, 1)) if packed else None
    reference = attention(q, k, v, mask, is_causal=not packed)
    batched = attention(q, k, v, None, is_causal=False, bias=causal_bias(T, mask, q))
    weight = torch.randn(B, T, H * K)
    expected = torch.autograd.grad((reference * weight).sum(), (q, k, v))
    found = torch.autograd.grad((batched * weight).sum(), (q, k, v))
    assert (reference - batched).abs().max() < 1e-5
    assert all((a - b).abs().max() < 1e-4 for a, b in zip(expected, found, strict=True))


def test_batched_attention_gradients_by_finite_differences() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 5, n, 4, dtype=torch.float64, requires_grad=True) for n in (2, 1, 1))
    bias = causal_bias(5, None, q)
    assert torch.autograd.gradcheck(lambda *x: attention(*x, None, is_causal=False, bias=bias), (q, k, v))


@pytest.mark.parametrize(("rows", "vocabulary"), [(7, 11), (2500, 97), (700, 5000)])
@pytest.mark.parametrize("ignored", [0.0, 0.3, 1.0])
def test_loss_and_gradients_equal_plain_cross_entropy(rows: int, vocabulary: int, ignored: float) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(rows, 16, requires_grad=True)
    weight = torch.randn(vocabulary, 16, requires_grad=True)
    targets = torch.randint(0, vocabulary, (rows,))
    targets[torch.rand(rows) < ignored] = -100
    expected = F.cross_entropy(hidden @ weight.t(), targets, reduction="sum")
    found = linear_cross_entropy(hidden, weight, targets)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, targets).item() == pytest.approx(found.item(), rel=1e-5, abs=1e-5)
    for a, b in zip(
        torch.autograd.grad(expected, (hidden, weight)), torch.autograd.grad(found, (hidden, weight)), strict=True
    ):
        assert (a - b).abs().max() <= 1e-4 * max(1.0, a.abs().max().item())


def test_the_loss_never_holds_all_logits() -> None:
    rows, vocabulary = 4096, 32_000
    hidden, weight = torch.randn(rows, 8, requires_grad=True), torch.randn(vocabulary, 8, requires_grad=True)
    sizes: list[int] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        linear_cross_entropy(hidden, weight, torch.zeros(rows, dtype=torch.long))
    assert max(sizes) <= vocabulary * 8


def test_packed_documents_are_as_if_alone() -> None:
    model = Llama(arch(), seed=3)
    first, second = tokens(1, 9, seed=1), tokens(1, 13, seed=2)
    together = torch.cat((first, second), dim=1)
    positions = torch.cat((torch.arange(9), torch.arange(13)))[None]
    segments = torch.tensor([[0] * 9 + [1] * 13])
    for grad in (True, False):  # the batched form, and PyTorch's
        with torch.set_grad_enabled(grad):
            packed = model(together, positions, segments)
            alone = torch.cat((model(first), model(second)), dim=1)
        assert (packed - alone).abs().max() < 1e-5


def test_activation_checkpointing_changes_no_gradient() -> None:
    x = tokens(2, 20)
    grads = []
    for on in (False, True):
        model = Llama(arch(), seed=5)
        model.set_activation_checkpointing(on)
        linear_cross_entropy(model(x).flatten(0, 1), model.head_weight, x.flatten()).backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))  # type: ignore[arg-type]


def test_generation_with_a_cache_equals_running_the_whole_each_time() -> None:
    model = Llama(arch(max_sequence_length=64), seed=2)
    written = generate(model, tokens(2, 5), 12, temperature=0.0)
    context = tokens(2, 5)
    for _ in range(12):
        with torch.no_grad():
            context = torch.cat((context, model.logits(model(context)[:, -1]).argmax(-1, keepdim=True)), 1)
    assert torch.equal(written, context)
    with pytest.raises(ConfigError, match="prompt"):
        generate(model, torch.zeros(1, 0, dtype=torch.long), 3)


def test_initial_weights_are_the_fields_custom() -> None:
    model = Llama(arch(dim=256, num_heads=4, num_kv_heads=4, head_dim=64, ffn_dim=512, num_layers=8), seed=0)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
            assert parameter.std().item() == pytest.approx(0.02 / (4.0 if residual else 1.0), rel=0.03), name


def test_roles_and_splits() -> None:
    model = Llama(arch(tie_embeddings=False, qk_norm=True), seed=0)
    roles = parameter_roles(model)
    assert roles["embedding.weight"] == "embedding"
    assert roles["head.weight"] == "head"
    assert roles["layers.0.attention.query_norm.weight"] == "vector"
    assert {role for name, role in roles.items() if "qkv" in name or "down" in name} == {"matrix"}
    assert split_sizes(model, "layers.0.attention.qkv.weight") == (64, 32, 32)
    assert split_sizes(model, "layers.1.feed_forward.gate_up.weight") == (80, 80)
    assert split_sizes(model, "layers.1.feed_forward.down.weight") == ()


def test_published_parameter_counts_are_met() -> None:
    checked = [preset for preset in catalog().values() if preset.published_params]
    assert len(checked) >= 8
    for preset in checked:
        assert preset.architecture.num_params() == preset.published_params, preset.name
        assert preset.source.startswith("http"), preset.name
    names = list(catalog())
    sizes = sorted(preset.architecture.num_params() for preset in catalog().values())
    assert sizes[0] < 2e6
    assert sizes[-1] > 4e11
    assert "llama-5m" in names


@pytest.mark.parametrize("name", ["llama-1m", "smollm2-135m"])
def test_counts_agree_with_the_built_module(name: str) -> None:
    shape = get_preset(name).architecture
    assert sum(p.numel() for p in Llama(shape, device="meta").parameters()) == shape.num_params()


def test_resolving_fields() -> None:
    wide = resolve(ModelSection(preset="llama-5m", dim=512), vocab_size=500)
    assert (wide.dim, wide.num_heads, wide.head_dim, wide.ffn_dim, wide.vocab_size) == (512, 8, 64, 1536, 500)
    with pytest.raises(ConfigError, match="model.num_heads must divide model.dim = 500, but got 7: try"):
        resolve(ModelSection(preset="llama-5m", dim=500, num_heads=7))
    with pytest.raises(ConfigError, match="did you mean 'llama-5m'"):
        resolve(ModelSection(preset="lama-5m"))
    with pytest.raises(ConfigError, match="model.num_kv_heads must divide model.num_heads = 4, but got 3"):
        resolve(ModelSection(preset="llama-5m", num_kv_heads=3))


def test_a_folder_that_is_not_ours_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(CheckpointError, match=r"is of model_type 'gpt2'.*model.family = 'auto'"):
        load_hf(tmp_path)
    with pytest.raises(CheckpointError, match="it has no config.json"):
        load_hf(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_hf(tmp_path)


def test_loaded_weights_bring_their_shape(tmp_path: Path) -> None:
    save_hf(Llama(arch(), seed=0), tmp_path)
    section = ModelSection(load=str(tmp_path))
    model, found = build_model(section, 97, 64, seed=0)
    assert found.dim == 48
    assert isinstance(model, Llama)
    with pytest.raises(ConfigError, match="model.dim must be left out or equal that of model.load, 48, but got 64"):
        build_model(ModelSection(load=str(tmp_path), dim=64), 97, 64, seed=0)
    with pytest.raises(CheckpointError, match="vocabulary must be at most the 97 rows"):
        build_model(section, 98, 64, seed=0)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="is damaged"):
        build_model(section, 97, 64, seed=0)
