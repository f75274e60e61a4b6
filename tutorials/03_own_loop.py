"""
The parts, in a loop of your own
================================

The loader, the model, the loss, the fp32 masters and the step are plain objects. Here they are put together by hand.
"""

# %%
# A corpus: documents in, duplicates out, split, tokenized, cached.

import email
from pathlib import Path

import torch

from trimtab.config.sections import DataSection, OptimSection, ScheduleSection
from trimtab.data import Loader, prepare_corpus
from trimtab.models.architecture import get_preset
from trimtab.models.llama import Llama
from trimtab.models.loss import linear_cross_entropy
from trimtab.models.roles import parameter_roles, split_sizes
from trimtab.train.optim import MasterWeights, build_optimizers
from trimtab.train.schedule import lr_scale
from trimtab.train.step import MicroBatch, train_step

section = DataSection(source="path", path=str(Path(email.__file__).parent), vocab_size=512, val_fraction=0.1)
corpus = prepare_corpus(section)
print(f"{corpus.num_documents} documents, {corpus.num_train_tokens:,} tokens, key {corpus.key[:8]}")

# %%
# A model with fp32 masters beside bf16 compute weights, and its optimizers.

shape = get_preset("llama-1m").architecture.replace(vocab_size=corpus.tokenizer.vocab_size)
model = Llama(shape, seed=0)
roles = parameter_roles(model)
weights = MasterWeights(model, torch.bfloat16, roles.__getitem__, lambda name: split_sizes(model, name))
optimizers = build_optimizers(weights, OptimSection(name="muon"), fused=True)
print(f"{shape.num_params():,} parameters; {sum(role == 'matrix' for role in roles.values())} matrices go to Muon")


def loss_sum(batch: MicroBatch) -> torch.Tensor:
    """Summed cross-entropy (nats)."""
    hidden = model(batch.tokens, batch.positions, batch.segments)
    return linear_cross_entropy(hidden.flatten(0, 1), model.head_weight, batch.targets.flatten())


# %%
# The loop. The loader is a pure function of the position, so there is no iterator to save.

loader = Loader(corpus.train, sequence_length=128, seed=0, packing="documents")
schedule, num_steps, batch_tokens = ScheduleSection(), 40, 1024
for step in range(num_steps):
    rows = loader.batch(step * batch_tokens, batch_tokens)
    arrays = (rows.tokens, rows.targets, rows.positions, rows.segments)
    whole = MicroBatch(*(torch.from_numpy(array) for array in arrays))
    result = train_step(
        loss_sum, [whole], rows.num_targets, weights, optimizers, lr_scale(step, num_steps, schedule), max_grad_norm=1.0
    )
    if step % 10 == 0 or step == num_steps - 1:
        print(f"step {step:3}  loss {result.loss:.4f}  gradient norm {result.grad_norm:.3f}")
