"""Records, atomic files, errors: the foundation."""

import doctest
import json
import math
import os
import subprocess
import sys

import pytest

import trimtab.core.errors
import trimtab.core.units
from trimtab.core import atomic, records
from trimtab.core.errors import ConfigError, RecordError, RunError, StorageError, TrimtabError, UserError, nearest
from trimtab.core.registry import Registry


def test_docstring_examples_are_true() -> None:
    for module in (trimtab.core.errors, trimtab.core.units):
        assert doctest.testmod(module).failed == 0


def test_import_is_quick_and_torch_free() -> None:
    code = "import sys, trimtab, trimtab.config, trimtab.core.records; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_the_exception_tree_has_exit_codes() -> None:
    assert UserError("x").exit_code == 2
    assert ConfigError("x").exit_code == 2
    assert StorageError("x").exit_code == 3
    assert issubclass(ConfigError, ValueError)
    assert issubclass(RunError, RuntimeError)
    assert issubclass(StorageError, TrimtabError)
    assert nearest("zzzzzz", ["optim.lr"]) == ""


@pytest.mark.parametrize("value", [1.5, math.nan, math.inf, -math.inf])
def test_records_round_trip_also_when_not_finite(tmp_path, value) -> None:
    path = tmp_path / "records.jsonl"
    step = records.Step(step=1, loss=value, grad_norm=2.0, lr=0.1, num_tokens=8, total_tokens=8, duration_s=0.1)
    writer = records.RecordWriter(path)
    writer.write(step)
    writer.close()
    json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    (back,) = records.read_records(path)
    assert back.time_s == step.time_s
    assert back.loss == value or (math.isnan(value) and math.isnan(back.loss))


def test_a_torn_line_is_passed_over_and_closed_by_the_next_writer(tmp_path) -> None:
    path = tmp_path / "records.jsonl"
    first = records.RecordWriter(path)
    first.write(records.Fault(step=1, what="one"))
    first.close()
    with open(path, "ab") as handle:
        handle.write(b'{"kind":"fault","schema":1,"st')
    second = records.RecordWriter(path)
    second.write(records.Fault(step=2, what="two"))
    second.close()
    assert [record.what for record in records.read_records(tmp_path)] == ["one", "two"]


def test_a_newer_schema_is_refused_and_unknown_kinds_are_passed_over(tmp_path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"kind":"comet","schema":1}\n')
    assert list(records.read_records(path)) == []
    path.write_text('{"kind":"fault","schema":99,"step":1,"what":"x"}\n')
    with pytest.raises(RecordError, match="schema must be at most 1, but got 99"):
        list(records.read_records(path))
    with pytest.raises(RecordError, match="no readable run"):
        list(records.read_records(tmp_path / "absent"))


def test_latest_attempt_drops_superseded_steps_only() -> None:
    def step(n, loss):
        return records.Step(step=n, loss=loss, grad_norm=1, lr=1, num_tokens=1, total_tokens=n, duration_s=1)

    start = records.RunStart(run_name="r", config_hash="h")
    resume = records.RunStart(run_name="r", config_hash="h", resumed_from_step=1)
    fault = records.Fault(step=3, what="x")
    kept = records.latest_attempt([start, step(1, 1.0), step(2, 2.0), fault, step(3, 3.0), resume, step(2, 4.0)])
    assert [r.loss for r in kept if isinstance(r, records.Step)] == [1.0, 4.0]
    assert fault in kept


def test_atomic_files_are_complete_or_absent(tmp_path) -> None:
    path = tmp_path / "deep" / "file.txt"
    atomic.write_text(path, "one")
    with pytest.raises(ZeroDivisionError), atomic.atomic_path(path) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "one"
    assert os.listdir(path.parent) == ["file.txt"]
    with pytest.raises(StorageError, match=r"a part of the path is a file|a file of that name"):
        atomic.write_text(path / "below", "x")


def test_a_registry_names_the_nearest() -> None:
    registry: Registry[int] = Registry("optim.name")
    registry.add("adamw")(1)
    assert registry.get("adamw") == 1
    with pytest.raises(ConfigError, match="did you mean 'adamw'"):
        registry.get("adam")
