"""The whole configuration of a run: one frozen object, checked when it is made."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from trimtab.config.field import check_section
from trimtab.config.sections import (
    CheckpointSection,
    DataSection,
    DeviceSection,
    EvaluateSection,
    ModelSection,
    OptimSection,
    ReportSection,
    RunSection,
    ScheduleSection,
    TrainSection,
)
from trimtab.core.errors import ConfigError, refusal


@dataclass(frozen=True)
class RunConfig:
    """All sections. Making one checks every field's range and the rules that span fields.

    Raises:
        ConfigError: a value is out of its range, or two fields contradict each other.
    """

    run: RunSection = field(default_factory=RunSection)
    device: DeviceSection = field(default_factory=DeviceSection)
    data: DataSection = field(default_factory=DataSection)
    model: ModelSection = field(default_factory=ModelSection)
    optim: OptimSection = field(default_factory=OptimSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    train: TrainSection = field(default_factory=TrainSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    evaluate: EvaluateSection = field(default_factory=EvaluateSection)
    report: ReportSection = field(default_factory=ReportSection)

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            check_section(getattr(self, item.name), item.name)
        self._check_batch()
        self._check_paths()

    def _check_batch(self) -> None:
        sequence, train, schedule = self.data.sequence_length, self.train, self.schedule
        where = f"data.sequence_length = {sequence}"
        if train.batch_tokens % sequence:
            rule, fix = f"must be a multiple of {where}", f"try {max(1, train.batch_tokens // sequence) * sequence}"
            raise ConfigError(refusal("train.batch_tokens", train.batch_tokens, rule, fix))
        if train.micro_batch_tokens:
            if train.micro_batch_tokens % sequence:
                fix = f"try {max(1, train.micro_batch_tokens // sequence) * sequence}"
                rule = f"must be a multiple of {where}"
                raise ConfigError(refusal("train.micro_batch_tokens", train.micro_batch_tokens, rule, fix))
            if train.batch_tokens % train.micro_batch_tokens:
                rule = f"must divide train.batch_tokens = {train.batch_tokens}"
                raise ConfigError(
                    refusal("train.micro_batch_tokens", train.micro_batch_tokens, rule, f"try {sequence}")
                )
        short = schedule.short_sequence_length
        if short and (short > sequence or sequence % short):
            raise ConfigError(refusal("schedule.short_sequence_length", short, f"must divide {where}", "try 64 or 0"))
        if schedule.warmup_fraction + (schedule.decay_fraction if schedule.name == "wsd" else 0.0) > 1.0:
            rule = f"plus schedule.decay_fraction = {schedule.decay_fraction} must be at most 1"
            raise ConfigError(refusal("schedule.warmup_fraction", schedule.warmup_fraction, rule, "lower one of them"))
        small = round(train.batch_tokens * schedule.small_batch_fraction)
        if schedule.small_batch_until and small % sequence:
            rule = f"times train.batch_tokens = {train.batch_tokens} must be a multiple of {where}"
            raise ConfigError(refusal("schedule.small_batch_fraction", schedule.small_batch_fraction, rule, "try 0.5"))

    def _check_paths(self) -> None:
        if self.model.family == "auto" and not self.model.load:
            fix = "set model.load to a Hugging Face model folder"
            raise ConfigError(refusal("model.family", self.model.family, "needs model.load", fix))
        if self.data.source == "path" and not self.data.path:
            raise ConfigError(refusal("data.source", "path", "needs data.path", "set data.path to a file or folder"))
        name = self.run.name
        if name and (name in {".", ".."} or "/" in name or "\x00" in name or len(name.encode()) > 200):
            raise ConfigError(refusal("run.name", name, "must be a plain folder name", "use letters, digits, - and _"))
