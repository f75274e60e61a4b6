"""What a run writes down: typed records, one JSON object a line, in `records.jsonl`.

Every figure in a report, a dashboard or a comparison comes from here and from nowhere else. The file is append-only:
each record goes out in one `write` on a descriptor opened with `O_APPEND`, so a `kill -9` leaves at most one torn last
line, which readers pass over. A torn tail is closed with a newline by the next writer, so the resumed run's first
record is never glued to it. Not-a-number and infinity are stored as the strings "nan", "inf" and "-inf", since strict
JSON has no word for them and a NaN loss is exactly what a reader must be able to see.

Each line holds `kind`, `schema` and the record's fields. Readers ignore fields they do not know (a newer writer may
add some) and refuse a schema number above their own. Rejected: a binary format (a person must be able to `tail -f`),
a database (a run directory is copied, mailed and read on laptops).

On resume the records of steps after the checkpoint remain in the file; `latest_attempt` drops the superseded ones.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from trimtab.core.atomic import storage_error
from trimtab.core.errors import RecordError, refusal

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Record:
    """What all records share."""

    kind: ClassVar[str] = ""
    time_s: float = field(default_factory=time.time)
    """Unix time at which it was made (seconds)."""


@dataclass(frozen=True, kw_only=True)
class RunStart(Record):
    """A process began to work on the run: the first start, or a resume."""

    kind: ClassVar[str] = "run_start"
    run_name: str
    config_hash: str
    resumed_from_step: int = -1
    """Step of the checkpoint it went on from; -1 for a fresh start."""
    num_params: int = 0
    num_params_non_embedding: int = 0
    tokens_per_step: int = 0
    """Tokens of one optimizer step over all ranks, at full batch and sequence length."""
    num_steps: int = 0
    flops_per_token: float = 0.0
    """Model FLOPs of forward and backward per trained token at full sequence length (no recomputation counted)."""
    peak_flops: float = 0.0
    """Measured GEMM rate of this machine in the compute dtype (FLOP/s); the denominator of MFU."""
    peak_flops_source: str = ""
    device: str = ""
    dtype: str = ""
    compiled: bool = False
    world_size: int = 1
    derived: dict[str, str] = field(default_factory=dict)
    """Derived values and, in words, the rule that gave each."""
    bytes_per_token: float = 0.0
    """Mean UTF-8 bytes per token of the validation set (bits per byte = loss / ln 2 / this)."""


@dataclass(frozen=True, kw_only=True)
class Step(Record):
    """One optimizer step. Steps count from 1: `step=n` is the state after n updates."""

    kind: ClassVar[str] = "step"
    step: int
    loss: float
    """Mean cross-entropy over the step's target tokens (nats per token)."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    """Learning rate of the first parameter group in this step."""
    num_tokens: int
    """Tokens trained in this step, over all ranks."""
    total_tokens: int
    """Tokens trained since the run began."""
    duration_s: float
    """Wall time of the step, data included, evaluation and checkpoints excluded (seconds)."""
    data_s: float = 0.0
    """Of that, waiting for the loader (seconds)."""
    tokens_per_s: float = 0.0
    mfu: float = 0.0
    """Model FLOPs utilization, against the measured peak (0 to 1)."""
    flops: float = 0.0
    """Model FLOPs of this step."""
    memory_bytes: int = 0
    """Peak memory in use: device memory on an accelerator, resident set on a CPU (bytes)."""
    cpu_s: float = 0.0
    """CPU time of this process in the step, user and system (seconds)."""
    energy_j: float = 0.0
    """Energy of the step (joules); see `energy_kind`."""
    energy_kind: str = "modelled"
    """`measured` (NVML, RAPL) or `modelled` (constants in the run's environment.json)."""
    sequence_length: int = 0
    compute_dtype: str = ""


@dataclass(frozen=True, kw_only=True)
class Evaluation(Record):
    """Loss on held-out documents."""

    kind: ClassVar[str] = "evaluation"
    step: int
    loss: float
    """Mean cross-entropy (nats per token)."""
    bits_per_byte: float
    num_tokens: int
    duration_s: float
    train_s: float = 0.0
    """Training seconds (steps only) spent until this evaluation, over all attempts."""
    total_tokens: int = 0
    total_flops: float = 0.0
    total_energy_j: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Sample(Record):
    """Text that the model wrote."""

    kind: ClassVar[str] = "sample"
    step: int
    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Record):
    """A checkpoint became complete on disk."""

    kind: ClassVar[str] = "checkpoint"
    step: int
    path: str
    """Relative to the run directory."""
    num_bytes: int
    blocking_s: float
    """Time that training stood still for it (seconds)."""
    write_s: float
    """Time from the request to completeness on disk (seconds)."""
    reason: str = "periodic"
    """`periodic`, `final`, `signal` or `best`."""


@dataclass(frozen=True, kw_only=True)
class Decision(Record):
    """A controller changed something, and why."""

    kind: ClassVar[str] = "decision"
    step: int
    controller: str
    action: str
    reason: str
    evidence: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Fault(Record):
    """Something went wrong, and what was done."""

    kind: ClassVar[str] = "fault"
    step: int
    what: str
    where: str = ""
    action: str = ""


@dataclass(frozen=True, kw_only=True)
class RunEnd(Record):
    """The process ended in good order."""

    kind: ClassVar[str] = "run_end"
    step: int
    outcome: str
    """`finished`, `target_reached`, `interrupted`, `time_limit` or `failed`."""
    reason: str = ""
    train_s: float = 0.0
    """Seconds in steps over all attempts."""
    wall_s: float = 0.0
    """Seconds since this process started the run."""
    startup_s: float = 0.0
    """Seconds from process start to the first step."""


KINDS: dict[str, type[Record]] = {
    cls.kind: cls for cls in (RunStart, Step, Evaluation, Sample, Checkpoint, Decision, Fault, RunEnd)
}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def to_json(record: Record) -> str:
    """One line of JSON (without the newline)."""
    body = {name: _plain(value) for name, value in dataclasses.asdict(record).items()}
    return json.dumps({"kind": record.kind, "schema": SCHEMA, **body}, separators=(",", ":"), allow_nan=False)


def from_dict(body: dict[str, Any]) -> Record | None:
    """The record in a parsed line, or None for a kind this version does not know.

    Raises:
        RecordError: the schema number is newer than this version's, or a field is missing.
    """
    schema = body.get("schema", 0)
    if not isinstance(schema, int) or schema > SCHEMA:
        raise RecordError(refusal("records.jsonl schema", schema, f"must be at most {SCHEMA}", "use a newer trimtab"))
    cls = KINDS.get(str(body.get("kind")))
    if cls is None:
        return None
    values: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        if item.name in body:
            value = body[item.name]
            if item.type in ("float", float) and isinstance(value, str):
                value = float(value)
            values[item.name] = value
    try:
        return cls(**values)
    except TypeError as error:
        raise RecordError(f"A {cls.kind} record lacks a field ({error}).") from error


class RecordWriter:
    """Appends records to a file; every record is handed to the kernel before `write` returns.

    Args:
        path: the `records.jsonl` to append to; made with its folder if absent.

    Raises:
        StorageError: the disk is full or read-only; what was written before stays readable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            size = os.fstat(self._descriptor).st_size
            if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                os.write(self._descriptor, b"\n")
        except OSError as error:
            raise storage_error(error, path) from error

    def write(self, record: Record) -> None:
        """Append one record."""
        try:
            os.write(self._descriptor, (to_json(record) + "\n").encode())
        except OSError as error:
            raise storage_error(error, self.path, "Records written so far are safe.") from error

    def close(self) -> None:
        """Flush to the disk and close; calling it twice is harmless."""
        if self._descriptor >= 0:
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file in order; torn or foreign lines are passed over.

    Args:
        path: a `records.jsonl`, or a run directory that holds one.

    Raises:
        RecordError: there is no such file, or it is of a newer schema.
    """
    if path.is_dir():
        path = path / "records.jsonl"
    try:
        handle = open(path, "rb")  # noqa: SIM115 - closed below, after the generator is spent
    except OSError as error:
        raise RecordError(
            f"There is no readable run at {str(path)!r} ({error.strerror}): name a run directory."
        ) from error
    with handle:
        for line in handle:
            try:
                body = json.loads(line)
            except ValueError:
                continue
            if isinstance(body, dict):
                record = from_dict(body)
                if record is not None:
                    yield record


def latest_attempt(records: Iterable[Record]) -> list[Record]:
    """The records that count: after a resume from step n, earlier records of steps above n are superseded and dropped.

    Faults, decisions and run starts are history and always stay.
    """
    kept: list[Record] = []
    for record in records:
        if isinstance(record, RunStart) and record.resumed_from_step >= 0:
            limit = record.resumed_from_step
            history = (RunStart, Fault, Decision, RunEnd)
            kept = [old for old in kept if isinstance(old, history) or getattr(old, "step", 0) <= limit]
        kept.append(record)
    return kept
