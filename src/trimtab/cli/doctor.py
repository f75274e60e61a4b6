"""`trimtab doctor`: what this machine has, what is fast on it, what trimtab will use, what is wrong."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from trimtab.core.errors import ConfigError, refusal
from trimtab.core.optional import need
from trimtab.core.units import format_bytes


def doctor(
    device: Annotated[str, typer.Option("--device", help="Device to examine, such as cpu or cuda:1.")] = "auto",
    num_threads: Annotated[int, typer.Option("--num-threads", help="CPU threads; 0: all usable cores.")] = 0,
    run_dir: Annotated[str, typer.Option("--run.dir", help="Folder that holds runs; its disk is measured.")] = "runs",
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Examine this machine: devices, measured GEMM rates per type, memory, disk, exchange between ranks (10 s).

    Exit code 0: training works here; 1: something must be mended first.
    """
    from pathlib import Path

    need("torch", "train", "trimtab doctor")
    from trimtab.config.sections import DeviceSection
    from trimtab.device.checkup import checkup

    if not 0 <= num_threads <= 4096:
        raise ConfigError(refusal("--num-threads", num_threads, "must be between 0 and 4096", "0 takes all cores"))
    console = Console()
    section = DeviceSection(name=device, num_threads=num_threads)
    if json_:
        found = checkup(section, Path(run_dir))
        typer.echo(json.dumps({**found.to_dict(), "healthy": found.is_healthy}, indent=2))
    else:
        with console.status("examining") as status:
            found = checkup(section, Path(run_dir), lambda text: status.update(text))
        _print(console, found)
    raise typer.Exit(0 if found.is_healthy else 1)


def _print(console: Console, found: object) -> None:
    from trimtab.device.checkup import Checkup

    assert isinstance(found, Checkup)
    machine, disk, network = found.machine, found.disk, found.network
    facts = Table(show_header=False, box=None, title="machine", title_justify="left")
    facts.add_row("CPU", f"{machine.cpu_model}, {machine.num_cores_usable} of {machine.num_cores_seen} cores usable")
    facts.add_row("instructions", ", ".join(machine.cpu_flags))
    memory = f"{format_bytes(machine.memory_free_bytes)} free of {format_bytes(machine.memory_total_bytes)}"
    facts.add_row("memory", memory)
    rate = disk["write_bytes_per_s"] / 1e6
    facts.add_row("disk", f"{rate:,.0f} MB/s written and flushed, {format_bytes(disk['free_bytes'])} free")
    exchange = f"{network.bytes_per_s / 1e9:.2f} GB/s all-reduce, {network.latency_s * 1e6:.0f} us latency"
    facts.add_row("two ranks", network.problem or f"{exchange} ({network.backend})")
    facts.add_row("software", f"Python {machine.python}, torch {found.torch}, {machine.system}")
    console.print(facts)
    rates = Table("device", "memory", "fp32", "bf16", "fp16", title="measured products, TFLOP/s", title_justify="left")
    for item in found.devices:
        row = found.gemm_flops.get(item["name"], {})
        cells = [f"{row[name] / 1e12:,.2f}" if row.get(name) else "-" for name in ("fp32", "bf16", "fp16")]
        rates.add_row(f"{item['name']}: {item['description']}", format_bytes(item["memory_bytes"]), *cells)
    console.print(rates)
    uses = Table(show_header=False, box=None, title="trimtab will use", title_justify="left")
    for name, why in found.uses.items():
        uses.add_row(name, why)
    console.print(uses)
    for problem in found.problems:
        console.print(f"{problem.severity}: {problem.what}; {problem.remedy}", markup=False, highlight=False)
    console.print("training works here" if found.is_healthy else "training does not work here yet", highlight=False)
