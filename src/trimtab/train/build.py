"""The composition root: builds device, data, model, weights, optimizers, checkpoints, records in that order.

Everything derived (steps, dtype, compile or not, model size) is decided here, once, with its rule in words; the loop
and the step receive finished parts. What is derived goes into the configuration that is saved, so a resume on another
machine trains the same model for the same number of steps.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from trimtab.checkpoint import CheckpointWriter, latest_good, load
from trimtab.config import RunConfig, apply_overrides, config_hash, to_toml
from trimtab.core.errors import CheckpointError, DeviceError, refusal
from trimtab.core.folders import cache_root
from trimtab.core.records import Fault, RecordWriter, RunStart
from trimtab.core.units import format_bytes, format_count
from trimtab.data import Corpus, Loader, prepare_corpus
from trimtab.data.cache import digest_of
from trimtab.device import Device, Meter, machine_peak, pick_dtype, select_device
from trimtab.estimate.memory import TrainingMemory, training_memory
from trimtab.models.architecture import Architecture, auto_preset, resolve
from trimtab.models.build import build_model, model_tokenizer
from trimtab.models.roles import parameter_roles, split_sizes
from trimtab.report.sinks import check_sinks, open_sinks
from trimtab.train.optim import MasterWeights, build_optimizers
from trimtab.train.parts import Parts, make_loss, read_rows
from trimtab.train.schedule import steps_for_tokens
from trimtab.train.state import restore, template
from trimtab.train.step import train_step

Bar = Callable[[str, float, float], None]
"""Shows progress of long work: (what, done, total)."""
DEFAULT_RUN_S = 150.0
"""Training seconds that a run of unstated length is sized for: three minutes with start-up, evaluation and report."""
COMPILE_S = 20.0
"""What compiling forward and backward costs on two cores (4 layers: 17 s at first, 6 s from Inductor's cache)."""
COMPILE_GAIN = 1.2
"""What compiling gains on two cores (measured: 137 against 112 ms a step at 5M parameters)."""
COMPILE_MARGIN = 2.0
"""`auto` compiles when the time saved, (1 - 1 / gain) of the run, exceeds the cost by this factor."""


def build(config: RunConfig, say: Callable[[str], None], bar: Bar | None = None, started_s: float = 0.0) -> Parts:
    """Build every part from a configuration; touches no run directory.

    Args:
        config: as loaded; derived fields may still be 0, "" or "auto".
        say: prints one line.
        bar: shows progress of long work.
        started_s: Unix time at which the command began; 0: now.

    Raises:
        UserError: some value cannot work here; the message says which and what would.
    """
    check_sinks(config.report.sinks)
    derived: dict[str, str] = {}
    device = select_device(config.device)
    derived["device.name"] = f"{device.name} ({device.describe()})"
    dtype_name, why = pick_dtype(device) if config.train.dtype == "auto" else (config.train.dtype, "as configured")
    derived["train.dtype"] = f"{dtype_name} ({why})"
    peak = machine_peak(device, dtype_name)
    if config.model.preset == "auto" and not config.model.load:
        preset = auto_preset(peak.flops)
        derived["model.preset"] = f"{preset} (sized to {peak.flops / 1e12:.2f} TFLOP/s of {dtype_name} products)"
        config = apply_overrides(config, {"model.preset": preset}, from_text=False)
    corpus = open_data(config, say, bar)
    length = config.data.sequence_length
    if not config.model.load:
        check_memory(resolve(config.model, corpus.tokenizer.vocab_size, peak.flops, length), config, dtype_name, device)
    model, arch = build_model(
        config.model, corpus.tokenizer.vocab_size, length, config.train.seed, device.torch_device, peak_flops=peak.flops
    )
    if config.train.activation_checkpointing:
        cast("Any", model).set_activation_checkpointing(True)
    compute_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype_name]
    roles = parameter_roles(model)
    weights = MasterWeights(model, compute_dtype, roles.__getitem__, lambda name: split_sizes(model, name))
    loss_sum = make_loss(model)
    parts = Parts(
        config=config,
        device=device,
        dtype_name=dtype_name,
        corpus=corpus,
        loader=Loader(corpus.train, length, config.train.seed, config.data.packing),
        model=model,
        arch=arch,
        weights=weights,
        optimizers=build_optimizers(weights, config.optim, fused=True),
        loss_sum=loss_sum,
        eager_loss_sum=loss_sum,
        peak_flops=peak.flops,
        peak_source=peak.source,
        meter=Meter(device, config.device),
        derived=derived,
        started_s=started_s or time.time(),
    )
    _derive_length_and_compile(parts)
    device.seed_all(config.train.seed)  # after all that may or may not draw, such as measuring products
    parts.config_toml, parts.config_hash = to_toml(parts.config), config_hash(parts.config)
    return parts


def modelled_memory(arch: Architecture, config: RunConfig, dtype_name: str) -> TrainingMemory:
    """Bytes that a run of this configuration holds (modelled, `estimate.memory`)."""
    return training_memory(
        arch,
        config.train.micro_batch_tokens or config.train.batch_tokens,
        compute_bytes=2 if dtype_name == "bf16" else 4,
        optimizer=config.optim.name,
        checkpointing=config.train.activation_checkpointing,
    )


def check_memory(arch: Architecture, config: RunConfig, dtype_name: str, device: Device) -> None:
    """Refuse a model that cannot fit before it is allocated: the kernel would kill the process without a word.

    Raises:
        DeviceError: weights, gradients and optimizer state alone exceed the device's memory.
    """
    need = modelled_memory(arch, config, dtype_name)
    have = device.memory_total_bytes()
    state = need.weights + need.gradients + need.optimizer
    if state > have:
        name = config.model.preset
        rule = (
            f"needs about {format_bytes(state)} for its state alone (modelled); {device.name} has {format_bytes(have)}"
        )
        raise DeviceError(refusal("model.preset", name, rule, "choose a smaller preset or fewer layers"))
    if need.total > have:
        rule = f"needs about {format_bytes(need.total)} with the model's state; {device.name} has {format_bytes(have)}"
        micro = config.train.micro_batch_tokens or config.train.batch_tokens
        fix = "lower it, or set train.activation_checkpointing to yes"
        raise DeviceError(refusal("train.micro_batch_tokens", micro, f"{rule} (modelled)", fix))


def open_data(config: RunConfig, say: Callable[[str], None], bar: Bar | None) -> Corpus:
    """The corpus of a run, with the tokenizer of the model that is loaded, if one is."""
    section = config.data
    if config.model.load and not section.tokenizer:
        folder = cache_root(section.cache_dir) / "tokenizers" / digest_of(config.model.load)
        section = dataclasses.replace(section, tokenizer=str(model_tokenizer(config.model, folder)))
    corpus = prepare_corpus(section, bar)
    num_bytes = sum(shard.num_bytes for shard in (*corpus.train, *corpus.val))
    say(
        f"data: {corpus.num_documents} documents, {format_bytes(num_bytes)}, {format_count(corpus.num_train_tokens)} "
        f"training and {format_count(corpus.num_val_tokens)} held-out tokens, vocabulary {corpus.tokenizer.vocab_size}"
    )
    return corpus


def _derive_length_and_compile(parts: Parts) -> None:
    """Fix `train.steps` and `train.compile`, timing the real step where a rule needs it."""
    config, train, derived = parts.config, parts.config.train, parts.derived
    steps, step_s = train.steps, 0.0
    if (not steps and not train.tokens) or train.compile == "auto":
        step_s = parts.step_s = time_step(parts)
    if not steps and train.tokens:
        steps = steps_for_tokens(train.tokens, train.batch_tokens, config.schedule)
        derived["train.steps"] = f"{steps} (train.tokens = {train.tokens} at {train.batch_tokens} a step)"
    elif not steps:
        steps = max(50, int(round(DEFAULT_RUN_S / step_s, -1)))
        derived["train.steps"] = f"{steps} ({DEFAULT_RUN_S:.0f} s of training at {step_s:.3f} s a step, timed here)"
    compiled, reason = train.compile == "on", "as configured"
    if train.compile == "auto":
        saving = steps * step_s * (1 - 1 / COMPILE_GAIN)
        compiled = saving > COMPILE_MARGIN * COMPILE_S and parts.device.can_compile()
        reason = f"an expected {saving:.0f} s saved against about {COMPILE_S:.0f} s of compiling"
    derived["train.compile"] = f"{'on' if compiled else 'off'} ({reason})"
    if compiled:
        forward = cast("Callable[..., Tensor]", torch.compile(parts.model, dynamic=False))
        parts.loss_sum = make_loss(parts.model, forward)
    parts.compiled = compiled
    changes = {"train.steps": steps, "train.compile": "on" if compiled else "off", "train.dtype": parts.dtype_name}
    parts.config = apply_overrides(config, changes, from_text=False)


def time_step(parts: Parts) -> float:
    """Seconds of one full training step here, eager; weights, moments and random state are left as they were.

    The learning rate is 0 and weight decay multiplies it, so the masters do not move; moments are cleared after.
    """
    config = parts.config
    micro_batches, num_targets = read_rows(parts, 0, config.train.batch_tokens, config.data.sequence_length)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        train_step(parts.eager_loss_sum, micro_batches, num_targets, parts.weights, parts.optimizers, 0.0, 0.0)
        parts.device.synchronize()
        best = min(best, time.perf_counter() - began)
    for optimizer in parts.optimizers:
        optimizer.state.clear()
    parts.weights.zero_grad()
    return best


def _load_newest(parts: Parts, folder: Path) -> list[tuple[Path, str]]:
    """Go on from the newest good checkpoint, or from the start where the run was killed before its first one."""
    found, _, rejected = latest_good(folder)
    parts.resumed_from = 0
    if found is None:
        if rejected:
            raise CheckpointError(f"No checkpoint of the run is usable (newest: {rejected[0][1]}) Start the run anew.")
        return []
    tensors = template(parts.weights, parts.optimizers)
    meta = load(found, tensors, check_hashes=False)
    if meta["corpus_key"] != parts.corpus.key:
        rule = f"must be {meta['corpus_key']}, with which the run began"
        fix = "bring back the same data and Python version, or start a new run"
        raise CheckpointError(refusal("The content key of the corpus", parts.corpus.key, rule, fix))
    parts.progress = restore(tensors, meta, parts.weights)
    parts.resumed_from = parts.progress.step
    return rejected


def open_run(parts: Parts, run_dir: Path, resume: bool) -> None:
    """Attach records, sinks and checkpoints in `run_dir`; on resume load the newest good checkpoint.

    Raises:
        CheckpointError: no checkpoint is usable, or it is of another architecture or corpus.
        StorageError: the folder cannot be written.
    """
    section = parts.config.checkpoint
    parts.run_dir = run_dir
    rejected = _load_newest(parts, run_dir / "checkpoints") if resume else []
    settings = {"config": parts.config_toml, "config_hash": parts.config_hash}
    parts.sinks = open_sinks(parts.config.report.sinks, run_dir, run_dir.name, settings)
    parts.records = RecordWriter(run_dir / "records.jsonl")
    parts.writer = CheckpointWriter(run_dir, section.keep_last, section.keep_best, section.background)
    tables = parts.arch.num_params() - parts.arch.num_params_non_embedding()
    parts.write(
        RunStart(
            run_name=run_dir.name,
            config_hash=parts.config_hash,
            resumed_from_step=parts.resumed_from,
            num_params=parts.num_params,
            num_params_non_embedding=parts.num_params - tables,
            tokens_per_step=parts.config.train.batch_tokens,
            num_steps=parts.config.train.steps,
            flops_per_token=parts.flops_per_token(parts.config.data.sequence_length),
            peak_flops=parts.peak_flops,
            peak_flops_source=parts.peak_source,
            device=parts.device.describe(),
            dtype=parts.dtype_name,
            compiled=parts.compiled,
            derived=parts.derived,
            bytes_per_token=parts.corpus.bytes_per_token_val,
        )
    )
    for path, why in rejected:
        action = f"fell back to step {parts.resumed_from}"
        parts.write(Fault(step=parts.resumed_from, what=f"checkpoint unusable: {why}", where=path.name, action=action))
