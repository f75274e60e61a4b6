"""The command line as a test calls it: in this process, in an empty working folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trimtab.cli.main import main

Run = Callable[..., tuple[int, str, str]]
"""Words of a command line -> exit code, output, error output."""


@pytest.fixture
def trimtab(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line in `tmp_path`; no command ever shows a traceback."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> tuple[int, str, str]:
        code = 0
        try:
            main([str(word) for word in words])
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run
