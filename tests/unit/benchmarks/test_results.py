"""Result files are what their schema says, and the docs can be made from them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema
import pytest

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("time_to_loss*.json")), ids=lambda path: path.name)
def test_a_result_fits_the_schema(path: Path) -> None:
    body = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.validate(body, json.loads((RESULTS / "schema.json").read_text(encoding="utf-8")))
    for entry in body["speed"]:
        own, peer = (entry["tokens_per_s"][entry[key]]["turns"] for key in ("best_own", "best_peer"))
        ratios = [a / b for a, b in zip(own, peer, strict=True)]
        assert entry["ratio"]["low"] == pytest.approx(min(ratios)), "the summary follows from the raw figures"
        assert entry["ratio"]["high"] == pytest.approx(max(ratios))


def test_the_full_run_is_recorded() -> None:
    body = json.loads((RESULTS / "time_to_loss.json").read_text(encoding="utf-8"))
    assert not body["quick"]
    assert {entry["dim"] for entry in body["speed"]} == {256, 512}
    assert len(body["to_loss"][0]["seeds"]) >= 3


def test_pages_are_made_from_code_and_results() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from generate import benchmarks_page, configuration_page, presets_page
    finally:
        sys.path.pop(0)
    page = benchmarks_page(RESULTS)
    assert "times** sooner" in page.replace("\n", " ")
    configuration = configuration_page()
    assert "`optim.lr`" in configuration
    assert configuration.count("\n: ") > 60
    assert "llama-3.1-405b" in presets_page()
