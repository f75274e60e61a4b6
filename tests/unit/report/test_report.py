"""The page, the comparison and the sinks, from records that a test writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trimtab.core.errors import ConfigError, RecordError
from trimtab.core.records import Checkpoint, Evaluation, Fault, RecordWriter, RunEnd, RunStart, Sample, Step
from trimtab.report import write_report
from trimtab.report.compare import compare, comparison_figures, write_comparison
from trimtab.report.plots import MAX_POINTS, run_figures
from trimtab.report.series import load_run, smooth, thin
from trimtab.report.sinks import open_sinks

HOSTILE = "</script><script>alert(1)</script> & <b>'\"\u2028"


def make_run(folder: Path, name: str, speed: float = 1.0, steps: int = 40, **more: object) -> Path:
    """A run whose loss is 8 - step / 10 and whose steps take `speed` seconds."""
    path = folder / name
    writer = RecordWriter(path / "records.jsonl")
    start = {"run_name": name, "config_hash": "abc", "num_params": 1000, "num_steps": steps, "bytes_per_token": 3.0}
    writer.write(RunStart(**{**start, **more}))  # type: ignore[arg-type]
    for step in range(steps + 1):
        if step:
            loss = float("nan") if step == 7 else 8.0 - step / 10
            writer.write(
                Step(
                    step=step,
                    loss=loss,
                    grad_norm=1.0,
                    lr=1e-3,
                    num_tokens=100,
                    total_tokens=100 * step,
                    duration_s=speed,
                    tokens_per_s=100 / speed,
                    flops=1e9,
                    energy_j=20.0 * speed,
                )
            )
        if step % 10 == 0:
            loss = 8.0 - step / 10
            totals = {"total_tokens": 100 * step, "total_flops": 1e9 * step, "total_energy_j": 20.0 * speed * step}
            bits = loss / 0.6931 / 3
            record = Evaluation(
                step=step,
                loss=loss,
                bits_per_byte=bits,
                num_tokens=50,
                duration_s=0.1,
                train_s=speed * step,
                **totals,  # type: ignore[arg-type]
            )
            writer.write(record)
    writer.write(Fault(step=7, what=HOSTILE, action="left out"))
    writer.write(Sample(step=steps, prompt="def ", text=HOSTILE))
    writer.write(Checkpoint(step=steps, path="checkpoints/step-40", num_bytes=10, blocking_s=0.01, write_s=0.1))
    writer.write(RunEnd(step=steps, outcome="finished"))
    writer.close()
    (path / "config.toml").write_text(
        f"[run]\nname = {name!r}\n[optim]\nlr = {speed}\n[device]\nprice_per_hour = 3.6\n"
    )
    return path


def test_the_page_is_self_contained_and_escapes_what_the_model_wrote(tmp_path: Path) -> None:
    page = write_report(make_run(tmp_path, "a")).read_text(encoding="utf-8")
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page
    head = page[: page.index("<script>")] + page[page.rindex("const figures") :]
    assert "http://" not in head
    assert "https://" not in head
    for word in ("validation loss", "Learning rate", "Gradient norm", "Throughput", "Energy so far", "Event log"):
        assert word in page, word
    line = page[page.index("const figures = ") + len("const figures = ") :].split(";\n", 1)[0]
    figures = {figure["key"]: figure for figure in json.loads(line)}
    assert set(figures) == {"loss", "bits", "lr", "norm", "speed", "mfu", "memory", "energy", "events"}
    raw, smoothed, validation = figures["loss"]["data"]
    assert raw["y"][6] is None, "not-a-number is a gap"
    assert all(value is not None for value in smoothed["y"])
    assert validation["y"] == [8.0, 7.0, 6.0, 5.0, 4.0]


def test_a_run_that_is_still_going_has_a_page(tmp_path: Path) -> None:
    path = make_run(tmp_path, "a")
    lines = (path / "records.jsonl").read_text().splitlines()
    (path / "records.jsonl").write_text("\n".join(lines[:12]) + '\n{"kind":"step","sch')
    assert "no end recorded" in write_report(path).read_text(encoding="utf-8")


def test_a_resume_does_not_draw_back(tmp_path: Path) -> None:
    path = make_run(tmp_path, "a")
    writer = RecordWriter(path / "records.jsonl")
    writer.write(RunStart(run_name="a", config_hash="abc", resumed_from_step=20))
    writer.write(Step(step=21, loss=1.0, grad_norm=1.0, lr=1.0, num_tokens=1, total_tokens=1, duration_s=1.0))
    writer.close()
    run = load_run(path)
    assert [s.step for s in run.steps] == list(range(1, 22))
    assert run.end is None


def test_long_runs_are_thinned(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path, "long", steps=9000))
    assert max(len(curve["x"]) for figure in run_figures(run) for curve in figure["data"]) <= MAX_POINTS
    assert thin(10, 4) == [0, 3, 6, 9]
    assert smooth([2.0, float("nan"), 2.0]) == [2.0, 2.0, 2.0]


def test_cost_to_the_same_loss_is_interpolated(tmp_path: Path) -> None:
    slow, fast = make_run(tmp_path, "slow", 2.0), make_run(tmp_path, "fast", 0.5)
    comparison, runs = compare([slow, fast], target=5.5)
    first, second = comparison.rows
    assert (first.step, first.train_s, first.tokens, first.flops) == pytest.approx((25.0, 50.0, 2500.0, 25e9))
    assert (first.energy_j, first.cost_usd) == pytest.approx((1000.0, 0.05))
    assert comparison.ratio(1, "train_s") == pytest.approx(0.25)
    assert comparison.ratio(1, "tokens") == pytest.approx(1.0)
    assert second.reached
    assert comparison.differences == {"optim.lr": ("2.0", "0.5")}
    assert json.loads(json.dumps(comparison.to_dict()))["rows"][1]["ratio_to_first"]["energy_j"] == pytest.approx(0.25)
    assert len(comparison_figures(comparison, runs)) == 4
    page = write_comparison(comparison, runs, tmp_path / "c.html").read_text(encoding="utf-8")
    assert "(0.25x)" in page


def test_the_target_is_what_all_reached_and_misses_are_said(tmp_path: Path) -> None:
    long, short = make_run(tmp_path, "long"), make_run(tmp_path, "short", steps=20)
    comparison, _ = compare([long, short])
    assert comparison.target == pytest.approx(6.0)
    missed, runs = compare([long, short], target=4.5)
    assert missed.rows[1].train_s is None
    assert missed.ratio(1, "train_s") is None
    assert "not reached" in write_comparison(missed, runs, tmp_path / "c.html").read_text(encoding="utf-8")


def test_unlike_runs_are_compared_with_a_warning(tmp_path: Path) -> None:
    a = make_run(tmp_path, "a", device="one")
    b = make_run(tmp_path, "b", device="two", bytes_per_token=4.0)
    comparison, _ = compare([a, b])
    assert comparison.measure == "bits_per_byte"
    assert len(comparison.warnings) == 3


def test_bad_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="There is no readable run"):
        load_run(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "records.jsonl").write_bytes(b"\x00\xff garbage\n")
    with pytest.raises(RecordError, match="has no records yet"):
        load_run(tmp_path / "empty")
    with pytest.raises(RecordError, match="runs must be at least two, but got 1"):
        compare([make_run(tmp_path, "a")])
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "records.jsonl").write_text('{"kind":"step","schema":99}\n')
    with pytest.raises(RecordError, match="must be at most 1, but got 99: use a newer trimtab"):
        load_run(newer)


def test_the_tensorboard_sink_holds_the_records(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = load_run(make_run(tmp_path, "a"))
    (sink,) = open_sinks("tensorboard", run.path, "a", {"config": "x = 1", "config_hash": "h"})
    for record in run.records:
        sink.write(record)
    sink.close()
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert {"train/loss", "train/lr", "validation/loss"} <= set(events.Tags()["scalars"])
    assert [item.step for item in events.Scalars("validation/loss")] == [0, 10, 20, 30, 40]
    assert events.Scalars("validation/loss")[-1].value == pytest.approx(4.0)


def test_an_unknown_sink_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        open_sinks("tensorbord", tmp_path, "a", {})
