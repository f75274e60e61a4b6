"""Every field of every section: docstring, unit, a default that builds, a strict parser."""

import tomllib

import pytest

from trimtab.config import (
    RunConfig,
    apply_overrides,
    config_hash,
    diff_configs,
    field_docs,
    load_config,
    parse_overrides,
    to_toml,
)
from trimtab.config.load import known_fields, to_dict
from trimtab.core.errors import ConfigError


def test_every_field_has_docstring_unit_and_default() -> None:
    docs = field_docs()
    for name, item in known_fields().items():
        assert len(docs.get(name, "")) > 15, f"{name} has no docstring"
        assert docs[name].endswith("."), f"the docstring of {name} is not a sentence"
        assert item.metadata["unit"], f"{name} has no unit"
    config = RunConfig()
    assert set(known_fields()) == {f"{s}.{k}" for s, values in to_dict(config).items() for k in values}


def test_toml_round_trip_is_exact(tmp_path) -> None:
    config = apply_overrides(
        RunConfig(), {"optim.lr": "0.00123", "evaluate.prompt": 'a "quote"\n\\ é', "run.name": "x"}
    )
    for comments in (False, True):
        path = tmp_path / f"{comments}.toml"
        path.write_text(to_toml(config, comments=comments), encoding="utf-8")
        assert load_config(path) == config
        tomllib.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optm.lr", "1e-3"], "did you mean 'optim.lr'"),
        (["--optim.lrr", "1e-3"], "did you mean 'optim.lr'"),
        (["--train.step", "3"], "did you mean 'train.steps'"),
        (["--optim.lr"], "--optim.lr needs a value"),
        (["steps=4"], "must be a flag of the form"),
    ],
)
def test_misspelt_flags_are_answered_with_the_nearest(words, message) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_overrides(words)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("optim.lr", "nan", r"optim.lr must be a finite number, but got nan"),
        ("optim.lr", "inf", r"optim.lr must be a finite number, but got inf"),
        ("optim.lr", "-1", r"optim.lr must be above 0 \(1/step\), but got -1.0: the default is 0.00"),
        ("optim.lr", "fast", r"optim.lr must be a number, but got 'fast'"),
        ("train.steps", "2.5", r"train.steps must be a whole number"),
        ("train.batch_tokens", "1000", r"train.batch_tokens must be a multiple of data.sequence_length = 256.*try 768"),
        ("train.micro_batch_tokens", "768", r"must divide train.batch_tokens = 2048"),
        ("optim.name", "adamww", r"optim.name must be one of adamw, muon.*did you mean 'adamw'"),
        ("run.name", "a/b", r"run.name must be a plain folder name"),
        ("checkpoint.keep_best", "perhaps", r"must be true or false"),
        ("schedule.short_sequence_length", "100", r"must divide data.sequence_length = 256"),
        ("model.family", "auto", r"model.family needs model.load"),
    ],
)
def test_wrong_values_name_field_value_rule_fix(field, value, message) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_overrides(RunConfig(), {field: value})


def test_toml_errors_are_one_sentence(tmp_path) -> None:
    cases = {
        "[optim]\nlrr = 1\n": "did you mean 'optim.lr'",
        "[optm]\nlr = 1\n": r"unknown section \[optm\].*did you mean \[optim\]",
        "[optim]\nlr = 'x'\n": "optim.lr must be a number, but got 'x'",
        "[train]\nsteps = true\n": "train.steps must be a whole number, but got True",
        "lr = 1\n": r"unknown section \[lr\]",
        "[optim\n": "is not TOML",
    }
    for text, message in cases.items():
        path = tmp_path / "bad.toml"
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_config(path)
    with pytest.raises(ConfigError, match="There is no configuration file"):
        load_config(tmp_path / "absent.toml")


def test_flags_beat_the_file_and_rules_see_both(tmp_path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[data]\nsequence_length = 512\n[train]\nbatch_tokens = 1024\n")
    assert load_config(path, {"data.sequence_length": "128"}).data.sequence_length == 128
    with pytest.raises(ConfigError, match="train.batch_tokens must be a multiple"):
        load_config(path, {"train.batch_tokens": "768"})


def test_hash_ignores_where_the_run_lives_and_sees_the_mathematics() -> None:
    base = RunConfig()
    assert config_hash(apply_overrides(base, {"run.name": "other", "device.num_threads": "1"})) == config_hash(base)
    assert config_hash(apply_overrides(base, {"optim.lr": "0.1"})) != config_hash(base)
    assert diff_configs(base, apply_overrides(base, {"optim.lr": "0.1"})) == {"optim.lr": (base.optim.lr, 0.1)}


def test_a_path_implies_its_source() -> None:
    assert apply_overrides(RunConfig(), {"data.path": "somewhere"}).data.source == "path"
