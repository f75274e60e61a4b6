"""The sections of a run's configuration. Each component is given its own section and never the whole.

Batch sizes are in tokens and say whose: global (one optimizer step over all ranks) or micro (one forward on one rank).
0 or an empty string means "derive it"; each derived value is printed once with its rule.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.config.field import option


@dataclass(frozen=True)
class RunSection:
    """Where the run lives."""

    name: str = option("", "name")
    """Folder of the run inside `run.dir`; empty: the date and time."""
    dir: str = option("runs", "path")
    """Folder that holds runs."""


@dataclass(frozen=True)
class DeviceSection:
    """What the run computes on, and the constants of the energy model where no meter is found."""

    name: str = option("auto", "device name")
    """`auto`, `cpu`, `cuda`, `cuda:1`, `xpu`, `mps` ...; auto takes the first accelerator that works, else the CPU."""
    num_threads: int = option(0, "threads", low=0, high=4096)
    """Threads per process for CPU compute; 0: all cores this process may use."""
    busy_w: float = option(0.0, "watts", low=0.0)
    """Modelled power of the device at full load; 0: 10 W per CPU core in use (a server CPU's TDP over its cores)."""
    idle_w: float = option(0.0, "watts", low=0.0)
    """Modelled power of the device at rest; 0: 30 % of `busy_w`."""
    price_per_hour: float = option(0.0, "US dollars per hour", low=0.0)
    """What an hour of this machine costs; used by `compare` and the report; 0: no cost is shown."""


@dataclass(frozen=True)
class DataSection:
    """What is learned from, and how it becomes tokens."""

    source: str = option("stdlib", "name", choices=("stdlib", "docstrings", "path"))
    """`stdlib`: source text of the running Python's standard library; `docstrings`: docstrings of installed packages;
    `path`: `data.path`. A non-empty `data.path` implies `path`."""
    path: str = option("", "path")
    """A file or folder of `.txt .md .py .jsonl .jsonl.zst .parquet`, or a Hugging Face dataset folder."""
    text_field: str = option("text", "name")
    """Field (column) that holds the text in jsonl, parquet and Hugging Face data."""
    tokenizer: str = option("", "path")
    """A `tokenizer.json` to use; empty: a byte-level BPE is trained on the training documents."""
    vocab_size: int = option(4096, "tokens", low=257, high=1_000_000)
    """Size of the BPE vocabulary that is trained when `data.tokenizer` is empty."""
    val_fraction: float = option(0.02, "fraction of documents", low=0.0001, high=0.5)
    """Share of documents held out for validation, chosen by document hash."""
    sequence_length: int = option(256, "tokens", low=8, high=4_194_304)
    """Tokens per sequence."""
    packing: str = option("stream", "name", choices=("stream", "documents"))
    """`stream`: documents run on in one stream of tokens; `documents`: attention and positions stop at boundaries."""
    cache_dir: str = option("", "path")
    """Where token shards are cached; empty: `$XDG_CACHE_HOME/trimtab` or `~/.cache/trimtab`."""
    num_workers: int = option(0, "processes", low=0, high=1024)
    """Processes that tokenize; 0: all cores."""
    max_document_bytes: int = option(64_000_000, "bytes", low=1)
    """A longer document is cut into pieces of at most this size."""
    max_bytes: int = option(0, "bytes", low=0)
    """Stop reading the corpus after this much text; 0: all of it."""


@dataclass(frozen=True)
class ModelSection:
    """The model: a preset by public architecture, changed field by field, or weights to start from."""

    preset: str = option("auto", "name")
    """Name of an architecture (`trimtab config show --presets` lists them); `auto`: sized to this machine."""
    load: str = option("", "path")
    """Weights to start from: a `.gguf` file, a Hugging Face model folder, or `pkg:PACKAGE/FILE` inside an installed
    package. Their architecture replaces the preset."""
    family: str = option("llama", "name", choices=("llama", "auto"))
    """`llama`: trimtab's own decoder; `auto`: `transformers.AutoModelForCausalLM` from the folder in `model.load`."""
    dim: int = option(0, "features", low=0)
    """Width of the residual stream; 0: the preset's."""
    num_layers: int = option(0, "layers", low=0)
    """Number of blocks; 0: the preset's."""
    num_heads: int = option(0, "heads", low=0)
    """Query heads; 0: the preset's."""
    num_kv_heads: int = option(0, "heads", low=0)
    """Key and value heads (grouped-query attention); 0: the preset's."""
    ffn_dim: int = option(0, "features", low=0)
    """Width of the feed-forward layer; 0: the preset's."""
    activation: str = option("", "name", choices=("", "swiglu", "relu2"))
    """Feed-forward non-linearity; empty: the preset's."""
    qk_norm: str = option("", "yes/no", choices=("", "yes", "no"))
    """Normalise queries and keys per head; empty: the preset's."""
    tie_embeddings: str = option("", "yes/no", choices=("", "yes", "no"))
    """Share the embedding with the output head; empty: the preset's."""
    rope_theta: float = option(0.0, "base", low=0.0)
    """Base of the rotary position embedding; 0: the preset's."""
    init_std: float = option(0.02, "standard deviation", above=0.0, high=1.0)
    """Standard deviation of the initial weights; residual projections get init_std / sqrt(2 num_layers)."""


@dataclass(frozen=True)
class OptimSection:
    """The optimizer."""

    name: str = option("adamw", "name", choices=("adamw", "muon"))
    """`adamw`: AdamW for all; `muon`: Muon for hidden matrices, AdamW for the rest (fewer steps to the same loss, but
    each costs more: it pays from about 8,192 tokens a step)."""
    lr: float = option(3e-3, "1/step", above=0.0, high=10.0)
    """Peak learning rate of AdamW groups (the learning rate before schedule and controllers)."""
    muon_lr: float = option(0.02, "1/step", above=0.0, high=10.0)
    """Peak learning rate of Muon groups (update of unit spectral norm, scaled by sqrt(max(1, rows/cols)))."""
    weight_decay: float = option(0.1, "1/step, times lr", low=0.0, high=10.0)
    """Decoupled weight decay of matrices; vectors and embeddings get none."""
    beta1: float = option(0.9, "fraction", low=0.0, high=0.9999)
    """Decay of AdamW's first moment."""
    beta2: float = option(0.95, "fraction", low=0.0, high=0.99999)
    """Decay of AdamW's second moment."""
    eps: float = option(1e-8, "gradient", above=0.0, high=1.0)
    """Added to the root of the second moment."""
    muon_momentum: float = option(0.95, "fraction", low=0.0, high=0.9999)
    """Decay of Muon's momentum (Nesterov)."""
    max_grad_norm: float = option(1.0, "gradient norm", low=0.0)
    """Clip the global gradient norm to this; 0: no clipping."""


@dataclass(frozen=True)
class ScheduleSection:
    """How learning rate, sequence length and batch change with the step: pure functions of the step."""

    name: str = option("wsd", "name", choices=("cosine", "wsd", "linear", "constant"))
    """`wsd`: warm up, hold, decay linearly; `cosine`; `linear`; `constant` (all with linear warm-up)."""
    warmup_fraction: float = option(0.05, "fraction of steps", low=0.0, high=1.0)
    """Share of the run in which the learning rate rises linearly from 0."""
    decay_fraction: float = option(0.5, "fraction of steps", low=0.0, high=1.0)
    """`wsd` only: share of the run, at its end, in which the learning rate falls."""
    final_lr_fraction: float = option(0.0, "fraction of peak", low=0.0, high=1.0)
    """Learning rate at the last step over its peak."""
    short_sequence_length: int = option(0, "tokens", low=0)
    """Sequence-length warm-up: start with sequences of this length at the same tokens per step; 0: none.
    Must divide `data.sequence_length`."""
    short_sequence_fraction: float = option(0.5, "fraction of steps", low=0.0, high=1.0)
    """Share of the run spent at the short length."""
    small_batch_fraction: float = option(1.0, "fraction of batch", above=0.0, high=1.0)
    """Batch warm-up: the first steps use this share of `train.batch_tokens`; 1: none."""
    small_batch_until: float = option(0.0, "fraction of steps", low=0.0, high=1.0)
    """Share of the run spent at the small batch."""


@dataclass(frozen=True)
class TrainSection:
    """The loop."""

    steps: int = option(0, "optimizer steps", low=0)
    """Length of the run; 0: from `train.tokens`, and if that is 0 too, sized for about three minutes here."""
    tokens: int = option(0, "tokens", low=0)
    """Length of the run in tokens (used when `train.steps` is 0)."""
    seed: int = option(0, "integer", low=0, high=2**31 - 1)
    """Seed of initial weights, data order and samples."""
    batch_tokens: int = option(2048, "tokens per step, global", low=8)
    """Tokens of one optimizer step over all ranks; a multiple of `data.sequence_length` times the ranks."""
    micro_batch_tokens: int = option(0, "tokens per forward, per rank", low=0)
    """Tokens of one forward and backward on one rank; 0: the whole share of the rank (no accumulation)."""
    dtype: str = option("auto", "name", choices=("auto", "bf16", "fp32"))
    """Compute type; masters and optimizer state are fp32. `auto`: bf16 where it is measured faster than fp32."""
    compile: str = option("auto", "name", choices=("auto", "on", "off"))
    """torch.compile; `auto`: where the expected saving exceeds the compile time of this run."""
    activation_checkpointing: bool = option(False, "yes/no")
    """Recompute each block in backward: about a third more compute, far less activation memory."""
    target_loss: float = option(0.0, "nats per token", low=0.0)
    """Stop at the first evaluation at or under this validation loss; 0: run to the end."""
    log_every: int = option(10, "steps", low=1)
    """Print a progress line this often where there is no terminal."""


@dataclass(frozen=True)
class CheckpointSection:
    """What is kept on disk to go on from."""

    every: int = option(250, "steps", low=0)
    """Write a checkpoint this often; 0: only at the end and on a signal."""
    keep_last: int = option(2, "checkpoints", low=1)
    """Keep this many of the newest."""
    keep_best: bool = option(True, "yes/no")
    """Also keep the one with the lowest validation loss (evaluated at the step it was taken)."""
    background: bool = option(True, "yes/no")
    """Write in the background from a copy of the state; no: training waits."""


@dataclass(frozen=True)
class EvaluateSection:
    """Validation and samples during the run."""

    every: int = option(100, "steps", low=0)
    """Evaluate this often, and at the end; 0: only at the end."""
    tokens: int = option(65_536, "tokens", low=8)
    """Validation tokens per evaluation (the same ones each time); fewer if the set is smaller."""
    prompt: str = option("def ", "text")
    """Prompt of the text sample at the end of the run."""
    sample_tokens: int = option(96, "tokens", low=0, high=100_000)
    """Length of the sample; 0: none."""
    temperature: float = option(0.8, "softmax temperature", low=0.0, high=100.0)
    """Sampling temperature; 0: greedy."""


@dataclass(frozen=True)
class ReportSection:
    """What is shown of the run beside its records."""

    html: bool = option(True, "yes/no")
    """Write `report.html` when the run ends (needs the extra `report`)."""
    sinks: str = option("", "names, comma-separated")
    """Further sinks of the records: `tensorboard`, `wandb`, `mlflow`, `trackio`."""
