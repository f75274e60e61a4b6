"""Pages made from code and from measured results: the configuration, the presets, the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trimtab.config import field_docs
from trimtab.config.load import known_fields, section_types
from trimtab.core.units import format_count
from trimtab.models.architecture import catalog


def configuration_page() -> str:
    """Every field with default, unit, range and meaning."""
    docs, known = field_docs(), known_fields()
    lines = ["# Configuration", "", "Every field of every section, from the code itself. Set one with", ""]
    lines += ["`--section.field VALUE` or in a TOML file; `trimtab config show` prints the resolved whole.", ""]
    for section, cls in section_types().items():
        lines += [f"## [{section}]", "", " ".join((cls.__doc__ or "").split()), ""]
        for name, item in known.items():
            if name.startswith(f"{section}."):
                meta = item.metadata
                bounds = [f"at least {meta['low']:g}" if meta["low"] is not None else ""]
                bounds += [f"above {meta['above']:g}" if meta["above"] is not None else ""]
                bounds += [f"at most {meta['high']:g}" if meta["high"] is not None else ""]
                bounds += ["one of " + ", ".join(f"`{c}`" for c in meta["choices"] if c) if meta["choices"] else ""]
                rule = "; ".join(part for part in bounds if part)
                facts = f"Default `{item.default!r}`, {meta['unit']}{'; ' + rule if rule else ''}."
                lines += [f"`{name}`", f": {docs[name]} {facts}", ""]
    return "\n".join(lines)


def presets_page() -> str:
    """Every preset with its source."""
    lines = ["# Model presets", "", "Architectures by name, for `model.preset`. Those of others are as published.", ""]
    lines += ["| preset | parameters | layers | dim | heads (key/value) | feed-forward | vocabulary | source |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for name, preset in catalog().items():
        a = preset.architecture
        source = f"[published {preset.date}]({preset.source})" if preset.source.startswith("http") else preset.source
        cells = [name, format_count(a.num_params()), a.num_layers, a.dim, f"{a.num_heads} ({a.num_kv_heads})"]
        cells += [a.ffn_dim, a.vocab_size, source]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join([*lines, ""])


def _machine(body: dict[str, Any]) -> str:
    machine = body["machine"]
    rate = machine["gemm_flops_per_s"]["bf16"] / 1e12
    return (
        f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['instructions'])}), torch {machine['torch']}, "
        f"transformers {machine['transformers']}; measured bf16 products {rate:.2f} TFLOP/s; {body['date']}."
    )


def _speed_table(entry: dict[str, Any]) -> list[str]:
    lines = [f"### d_model {entry['dim']}, {format_count(entry['parameters'])} parameters", ""]
    lines += [
        "| arm | tokens/s (median) | lowest turn | highest turn | share of the GEMM rate |",
        "|---|---|---|---|---|",
    ]
    for name, rates in sorted(entry["tokens_per_s"].items(), key=lambda item: item[1]["median"]):
        low, high, share = min(rates["turns"]), max(rates["turns"]), entry["share_of_gemm_rate"][name]
        lines.append(f"| {name} | {rates['median']:,.0f} | {low:,.0f} | {high:,.0f} | {share:.0%} |")
    ratio = entry["ratio"]
    lines += [
        "",
        f"`{entry['best_own']}` against the better peer, `{entry['best_peer']}`: **{ratio['median']:.2f} times**",
    ]
    lines += [f"(turn by turn {ratio['low']:.2f} to {ratio['high']:.2f}). The loader takes"]
    products = entry["gemm_flops_per_s"]
    low, high = min(products["turns"]) / 1e12, max(products["turns"]) / 1e12
    lines += [f"{entry['loader_share_of_step']:.2%} of a step. bf16 products between the turns:"]
    lines += [f"{products['median'] / 1e12:.2f} TFLOP/s ({low:.2f} to {high:.2f}).", ""]
    return lines


def _loss_table(entry: dict[str, Any]) -> list[str]:
    lines = [f"### d_model {entry['dim']}, {entry['steps']} steps", ""]
    lines += ["| seed | target loss | arm | learning rate | seconds to target | final loss | times shorter |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for seed in entry["seeds"]:
        for name, arm in seed["arms"].items():
            seconds, times = arm["seconds_to_target"], seed["times_shorter"][name]
            shown = f"{seconds:.1f} | {arm['final_loss']:.4f} | {times:.2f}" if seconds else "not reached | - | -"
            lines.append(f"| {seed['seed']} | {seed['target_loss']:.4f} | {name} | {arm['lr']:g} | {shown} |")
    found = entry["times_shorter_than_trainer"]
    if found:
        lines += ["", f"trimtab reaches the Trainer's final validation loss **{found['median']:.2f} times** sooner"]
        lines += [f"({found['low']:.2f} to {found['high']:.2f}, {entry['reached']} of {len(entry['seeds'])} seeds)."]
    return [*lines, ""]


def benchmarks_page(results: Path) -> str:
    """The measured figures, from the result files."""
    lines = ["# Benchmarks", "", "Made from the files in `benchmarks/results/`. The arms run as separate processes in"]
    lines += [
        "turns of a few steps, on the same tokens, architecture and cores; ratios are taken turn by turn. Peers get"
    ]
    lines += ["the better of eager and compiled and a learning rate tuned for them.", ""]
    path = results / "time_to_loss.json"
    if not path.is_file():
        return "\n".join([*lines, "No full run is recorded yet: `python benchmarks/time_to_loss.py` makes one.", ""])
    body = json.loads(path.read_text(encoding="utf-8"))
    lines += [_machine(body), "", "## Speed", ""]
    for entry in body["speed"]:
        lines += _speed_table(entry)
    lines += [f"Start-up to the first step with cached data: {body['startup_s']:.1f} s.", ""]
    lines += ["## Time to the same loss", ""]
    for entry in body["to_loss"]:
        lines += _loss_table(entry)
    if "tuning" in body:
        tuning = body["tuning"]
        lines += [f"Learning rates were tuned at {tuning['steps']} steps (final validation loss by rate):", ""]
        for arm, losses in tuning["final_loss"].items():
            lines.append(f"- {arm}: " + ", ".join(f"{rate}: {loss:.4f}" for rate, loss in losses.items()))
    return "\n".join([*lines, ""])


def write_pages(folder: Path) -> None:
    """Write all generated pages."""
    target = folder / "generated"
    target.mkdir(exist_ok=True)
    pages = {
        "configuration.md": configuration_page(),
        "presets.md": presets_page(),
        "benchmarks.md": benchmarks_page(folder.parent / "benchmarks" / "results"),
    }
    for name, text in pages.items():
        path = target / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
