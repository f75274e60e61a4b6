"""The composition root: builds device, data, model, weights, optimizers, checkpoints, records in that order.

Everything derived (steps, dtype, compile or not, model size) is decided here, once, with its rule in words; the loop
and the step receive finished parts.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.checkpoint import CheckpointWriter, latest_good, load
from trimtab.config import RunConfig, apply_overrides, config_hash, to_toml
from trimtab.core.errors import CheckpointError
from trimtab.core.records import Fault, Record, RecordWriter, RunStart
from trimtab.data import Batch, Corpus, Loader, prepare_corpus, validation_batches
from trimtab.device import Device, Meter, machine_peak, pick_dtype, select_device
from trimtab.estimate.flops import train_flops_per_token
from trimtab.models import build_model, generate, linear_cross_entropy, parameter_roles, split_sizes
from trimtab.report import Sink, open_sinks
from trimtab.train.optim import MasterWeights, build_optimizers
from trimtab.train.schedule import steps_for_tokens
from trimtab.train.state import Progress, restore, template
from trimtab.train.step import MicroBatch, train_step

DEFAULT_RUN_S = 150.0
"""Training seconds that a run of unstated length is sized for: three minutes with start-up, evaluation and report."""
COMPILE_S = 60.0
"""What compiling forward and backward costs on two cores (measured 30 to 60 s for 4 to 6 layers)."""
COMPILE_GAIN = 1.2
"""What compiling is expected to gain; `auto` compiles when (1 - 1 / gain) of the run exceeds `COMPILE_S`."""


@dataclass
class Parts:
    """All that the loop works with."""

    config: RunConfig
    """Resolved: nothing in it is derived any more."""
    config_toml: str
    config_hash: str
    run_dir: Path
    device: Device
    dtype_name: str
    corpus: Corpus
    loader: Loader
    model: nn.Module
    architecture: dict[str, Any]
    weights: MasterWeights
    optimizers: list[torch.optim.Optimizer]
    loss_sum: Callable[[MicroBatch], Tensor]
    flops_per_token: Callable[[int], float]
    peak_flops: float
    peak_source: str
    meter: Meter
    derived: dict[str, str]
    started_s: float
    progress: Progress = field(default_factory=Progress)
    resumed_from: int = -1
    compiled: bool = False
    records: RecordWriter | None = None
    sinks: list[Sink] = field(default_factory=list)
    checkpoints: CheckpointWriter = None  # type: ignore[assignment]

    def seconds_since_start(self) -> float:
        """Seconds since the command began."""
        return time.time() - self.started_s

    def write(self, record: Record) -> None:
        """Hand a record to the file and the sinks."""
        assert self.records is not None, "open_run comes first"
        self.records.write(record)
        for sink in self.sinks:
            sink.write(record)

    def write_finished_checkpoints(self) -> None:
        """Record what the background writer has completed."""
        for record in self.checkpoints.poll():
            self.write(record)

    def validation_batches(self) -> Iterator[Batch]:
        """The held-out batches of an evaluation."""
        config = self.config
        length = config.data.sequence_length
        rows = max(1, (config.train.micro_batch_tokens or config.train.batch_tokens) // length)
        return iter(
            validation_batches(self.corpus.val_shard(), length, config.evaluate.tokens, rows, config.data.packing)
        )

    def generate(self, prompt: str, num_tokens: int, temperature: float) -> str:
        """Text that the model writes after `prompt`."""
        tokenizer = self.corpus.tokenizer
        ids = list(tokenizer.encode(prompt)) or [tokenizer.eos_id]
        tokens = torch.tensor([ids], device=self.device.torch_device)
        generator = torch.Generator(self.device.torch_device).manual_seed(self.config.train.seed)
        written = generate(self.model, tokens, num_tokens, temperature=temperature, generator=generator)
        return str(tokenizer.decode(written[0, len(ids) :].tolist()))


def make_loss(model: nn.Module) -> Callable[[MicroBatch], Tensor]:
    """Summed cross-entropy of a micro-batch (nats) as a function that torch.compile can take whole."""

    def loss_sum(micro_batch: MicroBatch) -> Tensor:
        hidden = model(micro_batch.tokens, micro_batch.positions, micro_batch.segments)
        flat = hidden.flatten(0, 1)
        return linear_cross_entropy(flat, model.head_weight, micro_batch.targets.flatten())

    return loss_sum


def build(
    config: RunConfig, say: Callable[[str], None], bar: Callable[[str, float, float], None] | None = None
) -> Parts:
    """Build every part from a configuration; touches no run directory.

    Args:
        config: as loaded; derived fields may still be 0, "" or "auto".
        say: prints one line.
        bar: shows progress of long work: (what, done, total).

    Raises:
        UserError: some value cannot work here; the message says which and what would.
    """
    started_s = time.time()
    derived: dict[str, str] = {}
    device = select_device(config.device)
    derived["device.name"] = f"{device.name} ({device.describe()})"
    device.seed_all(config.train.seed)
    corpus = prepare_corpus(config.data, bar)
    say(f"data: {corpus.describe()}")
    model, architecture = build_model(
        config.model, corpus.tokenizer.vocab_size, config.data.sequence_length, config.train.seed, device.torch_device
    )
    dtype_name, why = pick_dtype(device) if config.train.dtype == "auto" else (config.train.dtype, "as configured")
    derived["train.dtype"] = f"{dtype_name} ({why})"
    compute_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype_name]
    if config.train.activation_checkpointing:
        model.activation_checkpointing = True  # type: ignore[assignment]
    roles = parameter_roles(model)
    weights = MasterWeights(model, compute_dtype, roles.__getitem__, lambda name: split_sizes(model, name))
    optimizers = build_optimizers(weights, config.optim, fused=True)
    peak = machine_peak(device, dtype_name)
    parts = Parts(
        config=config,
        config_toml="",
        config_hash="",
        run_dir=Path(),
        device=device,
        dtype_name=dtype_name,
        corpus=corpus,
        loader=Loader(corpus.train_shards(), config.data.sequence_length, config.train.seed, config.data.packing),
        model=model,
        architecture=dataclasses.asdict(architecture),
        weights=weights,
        optimizers=optimizers,
        loss_sum=make_loss(model),
        flops_per_token=lambda length: train_flops_per_token(architecture, length),
        peak_flops=peak.flops,
        peak_source=peak.source,
        meter=Meter(device, config.device),
        derived=derived,
        started_s=started_s,
    )
    _derive_length_and_compile(parts)
    parts.config_toml, parts.config_hash = to_toml(parts.config), config_hash(parts.config)
    return parts


def _derive_length_and_compile(parts: Parts) -> None:
    """Fix `train.steps` and `train.compile`, timing the real step where a rule needs it."""
    config, train, derived = parts.config, parts.config.train, parts.derived
    steps, step_s = train.steps, 0.0
    if (not steps and not train.tokens) or train.compile == "auto":
        step_s = time_step(parts)
    if not steps and train.tokens:
        steps = steps_for_tokens(train.tokens, train.batch_tokens, config.schedule)
        derived["train.steps"] = f"{steps} (train.tokens = {train.tokens} at {train.batch_tokens} a step)"
    elif not steps:
        steps = max(50, round(DEFAULT_RUN_S / step_s, -1)) if step_s else 50
        derived["train.steps"] = (
            f"{int(steps)} ({DEFAULT_RUN_S:.0f} s of training at {step_s:.3f} s a step, timed here)"
        )
    steps = int(steps)
    compiled, reason = train.compile == "on", "as configured"
    if train.compile == "auto":
        saving = steps * step_s * (1 - 1 / COMPILE_GAIN)
        compiled = saving > COMPILE_S and parts.device.can_compile()
        reason = f"an expected {saving:.0f} s saved against about {COMPILE_S:.0f} s of compiling"
    derived["train.compile"] = f"{'on' if compiled else 'off'} ({reason})"
    if compiled:
        torch._dynamo.config.recompile_limit = 32
        parts.loss_sum = torch.compile(parts.loss_sum, dynamic=False)
    parts.compiled = compiled
    changes = {"train.steps": steps, "train.compile": "on" if compiled else "off", "train.dtype": parts.dtype_name}
    parts.config = apply_overrides(config, changes, from_text=False)


def time_step(parts: Parts) -> float:
    """Seconds of one training step here, eager; weights, moments and random state are left as they were.

    The learning rate is 0 and weight decay multiplies it, so the masters do not move; moments are cleared after.
    """
    from trimtab.train.loop import micro_batches_of

    sized = apply_overrides(parts.config, {"train.steps": parts.config.train.steps or 1000}, from_text=False)
    original, parts.config = parts.config, sized
    micro_batches, num_targets, _, _ = micro_batches_of(parts, sized.train.steps - 1)
    parts.config = original
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        train_step(parts.loss_sum, micro_batches, num_targets, parts.weights, parts.optimizers, 0.0, 0.0)
        parts.device.synchronize()
        best = min(best, time.perf_counter() - began)
    for optimizer in parts.optimizers:
        optimizer.state.clear()
    parts.weights.zero_grad()
    return best


def open_run(parts: Parts, run_dir: Path, resume: bool) -> None:
    """Attach records, sinks and checkpoints in `run_dir`; on resume load the newest good checkpoint.

    Raises:
        CheckpointError: there is nothing to resume from, or it is of another architecture.
        StorageError: the folder cannot be written.
    """
    section = parts.config.checkpoint
    parts.run_dir = run_dir
    folder = run_dir / "checkpoints"
    rejected: list[tuple[Path, str]] = []
    if resume:
        found, _, rejected = latest_good(folder)
        if found is None:
            raise CheckpointError(f"There is no complete checkpoint in {str(folder)!r}: start the run anew.")
        tensors = template(parts.weights, parts.optimizers)
        meta = load(found, tensors)
        parts.progress = restore(tensors, meta, parts.weights)
        parts.resumed_from = parts.progress.step
    parts.records = RecordWriter(run_dir / "records.jsonl")
    parts.checkpoints = CheckpointWriter(run_dir, section.keep_last, section.keep_best, section.background)
    settings = {"config": parts.config_toml, "config_hash": parts.config_hash}
    parts.sinks = open_sinks(parts.config.report.sinks, run_dir, run_dir.name, settings)
    matrix_free = sum(p.numel() for p in parts.model.parameters())
    parts.write(
        RunStart(
            run_name=run_dir.name,
            config_hash=parts.config_hash,
            resumed_from_step=parts.resumed_from,
            num_params=matrix_free,
            num_params_non_embedding=int(parts.architecture.get("num_params_non_embedding", 0)),
            tokens_per_step=parts.config.train.batch_tokens,
            num_steps=parts.config.train.steps,
            flops_per_token=parts.flops_per_token(parts.config.data.sequence_length),
            peak_flops=parts.peak_flops,
            peak_flops_source=parts.peak_source,
            device=parts.device.describe(),
            dtype=parts.dtype_name,
            compiled=parts.compiled,
            derived=parts.derived,
            bytes_per_token=parts.corpus.val_bytes_per_token,
        )
    )
    for path, why in rejected:
        action = f"fell back to step {parts.resumed_from}"
        parts.write(Fault(step=parts.resumed_from, what=f"checkpoint unusable: {why}", where=path.name, action=action))
