from pathlib import Path


def write_report(run_dir: Path) -> Path:
    """Stub."""
    return run_dir
