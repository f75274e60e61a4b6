"""Schedules are pure functions with exact values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.config.sections import ScheduleSection
from trimtab.train.schedule import batch_tokens_at, lr_scale, sequence_length_at, steps_for_tokens, tokens_before


@pytest.mark.parametrize(
    ("name", "step", "value"),
    [
        ("cosine", 0, 0.1),
        ("cosine", 9, 1.0),
        ("cosine", 10, 1.0),
        ("cosine", 55, 0.5),
        ("linear", 55, 0.5),
        ("constant", 99, 1.0),
        ("wsd", 49, 1.0),
        ("wsd", 99, 1 - 50 / 51),
    ],
)
def test_exact_values(name, step, value) -> None:
    section = ScheduleSection(name=name, warmup_fraction=0.1, decay_fraction=0.5)
    assert lr_scale(step, 100, section) == pytest.approx(value, abs=1e-12)


@given(
    st.sampled_from(["cosine", "linear", "wsd", "constant"]), st.integers(1, 5000), st.floats(0, 0.5), st.floats(0, 0.5)
)
def test_the_scale_stays_in_range_and_rises_then_falls(name, num_steps, warmup, decay) -> None:
    section = ScheduleSection(name=name, warmup_fraction=warmup, decay_fraction=decay)
    values = [lr_scale(step, num_steps, section) for step in range(0, num_steps, max(1, num_steps // 50))]
    assert all(0 <= value <= 1 for value in values)
    peak = values.index(max(values))
    assert values[peak:] == sorted(values[peak:], reverse=True)


@given(st.integers(1, 300), st.floats(0, 1), st.sampled_from([0.25, 0.5, 1.0]))
def test_tokens_before_is_the_sum_of_batches(num_steps, until, fraction) -> None:
    section = ScheduleSection(small_batch_until=until, small_batch_fraction=fraction)
    total = 0
    for step in range(num_steps):
        assert tokens_before(step, num_steps, 1024, section) == total
        total += batch_tokens_at(step, num_steps, 1024, section)


@given(st.integers(1, 10**7), st.floats(0, 1))
def test_steps_for_tokens_is_the_least_that_suffices(num_tokens, until) -> None:
    section = ScheduleSection(small_batch_until=until, small_batch_fraction=0.5)
    steps = steps_for_tokens(num_tokens, 1024, section)
    assert tokens_before(steps, steps, 1024, section) >= num_tokens
    assert steps == 1 or tokens_before(steps - 1, steps - 1, 1024, section) < num_tokens


def test_short_sequences_come_first() -> None:
    section = ScheduleSection(short_sequence_length=64, short_sequence_fraction=0.6)
    lengths = [sequence_length_at(step, 10, 256, section) for step in range(10)]
    assert lengths == [64] * 6 + [256] * 4
