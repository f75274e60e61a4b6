"""Tokens per second and time to the same validation loss: trimtab, Hugging Face Trainer, a plain loop.

    python benchmarks/time_to_loss.py --quick      under five minutes: speed at d = 256, one short run to a loss
    python benchmarks/time_to_loss.py              the full run: learning rates tuned per arm, three seeds, two sizes

All arms learn the same tokens (this Python's standard library, 4,096 BPE tokens) with the same architecture, eight
sequences of 256 tokens a step, bf16, on the same cores. They run as separate processes in turns of a few steps
(`arms/common.py`), so drift of the machine hits all alike. Ratios are taken turn by turn and reported as median and
spread. Peers get the better of eager and compiled, and their own tuned learning rate; their compile time is not
counted, trimtab's is. The machine's own rate of bf16 products is measured after each round of turns: on a shared
machine it changes by several times within minutes, so a share of it means something only side by side.

Writes a JSON file that `benchmarks/results/schema.json` describes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent / "arms"))

from common import SHAPES, TOKENS_PER_STEP, VOCAB_SIZE, Settings

from trimtab.config.sections import DataSection, DeviceSection
from trimtab.data import prepare_corpus
from trimtab.device import machine_peak, measure_gemm, select_device
from trimtab.device.gemm import CPU_SHAPES
from trimtab.estimate.flops import train_flops_per_token
from trimtab.hardware import probe
from trimtab.models.architecture import get_preset
from trimtab.report.compare import crossing

HERE = Path(__file__).parent
RESULTS = HERE / "results"
ARMS = ("hf_trainer", "plain_loop", "trimtab")
RATES = {"hf_trainer": (1e-3, 2e-3, 4e-3), "plain_loop": (1e-3, 2e-3, 4e-3), "trimtab": (2e-3, 4e-3, 8e-3)}
"""Learning rates tried per arm."""


def say(text: str) -> None:
    """Progress on the error output."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


class Arm:
    """One process of the benchmark, waiting for its turns."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        command = [sys.executable, str(HERE / "arms" / "run.py"), json.dumps(asdict(settings))]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=HERE / "arms")
        self.result: dict[str, Any] = {}
        self.next()

    @property
    def label(self) -> str:
        """Name for messages and results."""
        return f"{self.settings.arm}{'_compiled' if self.settings.compiled else ''}"

    def next(self) -> bool:
        """Read until the arm waits for a turn (True) or has finished (False)."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("READY"):
                return True
            if line.startswith("RESULT "):
                self.result = json.loads(line[7:])
                self.process.wait()
                return False
        raise SystemExit(f"the arm {self.label} died with exit code {self.process.wait()}")

    def turn(self) -> bool:
        """Let it run its steps; False when it has finished."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self.next()


def race(settings: list[Settings], between: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
    """Run arms in turns; returns their results in order. `between` is called after each round."""
    arms = []
    for one in settings:  # each sets up (and compiles) alone
        arms.append(Arm(one))
    running = list(arms)
    while running:
        running = [arm for arm in running if arm.turn()]
        between()
    return [{"arm": arm.label, "lr": arm.settings.lr, "seed": arm.settings.seed, **arm.result} for arm in arms]


def turn_rates(result: dict[str, Any], turn_steps: int) -> list[float]:
    """Tokens per second of each whole turn but the first (warm-up)."""
    times = result["step_s"]
    turns = [times[i : i + turn_steps] for i in range(turn_steps, len(times) - turn_steps + 1, turn_steps)]
    return [TOKENS_PER_STEP * len(turn) / sum(turn) for turn in turns]


def speed(dim: int, turns: int, turn_steps: int, corpus: str) -> dict[str, Any]:
    """Throughput of all arms, eager and compiled, in turns."""
    say(f"speed at d = {dim}: set-up and compilation of six processes, then {turns} turns of {turn_steps} steps each")
    steps = turn_steps * (turns + 1)
    plan = [
        Settings(arm, dim, steps, 1e-3, 0, 0, 1, corpus, turn_steps, compiled)
        for arm in ("hf_trainer", "plain_loop", "trimtab_plain")
        for compiled in (False, True)
    ]
    device = select_device(DeviceSection())
    products: list[float] = []

    def measure_products() -> None:
        rate = max(measure_gemm(device, torch.bfloat16, shape, budget_s=0.1) for shape in CPU_SHAPES)
        products.append(rate)

    results = race(plan, measure_products)
    rates = {result["arm"].replace("_plain", ""): turn_rates(result, turn_steps) for result in results}
    medians = {name: statistics.median(values) for name, values in rates.items()}
    peer = max((name for name in medians if not name.startswith("trimtab")), key=lambda name: medians[name])
    own = max((name for name in medians if name.startswith("trimtab")), key=lambda name: medians[name])
    ratios = [a / b for a, b in zip(rates[own], rates[peer], strict=True)]
    shape = get_preset("llama-5m").architecture.replace(
        vocab_size=VOCAB_SIZE, num_kv_heads=SHAPES[dim]["num_heads"], **SHAPES[dim]
    )
    flops = train_flops_per_token(shape, 256)
    products = products[1 : 1 + len(ratios)]
    ours = [result for result in results if result["arm"].startswith("trimtab")]
    data_share = statistics.median(
        d / s for result in ours for d, s in zip(result["data_s"], result["step_s"], strict=True)
    )
    return {
        "dim": dim,
        "parameters": shape.num_params(),
        "tokens_per_s": {name: {"median": medians[name], "turns": values} for name, values in rates.items()},
        "setup_s": {result["arm"].replace("_plain", ""): result["setup_s"] for result in results},
        "best_peer": peer,
        "best_own": own,
        "ratio": {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)},
        "gemm_flops_per_s": {"median": statistics.median(products), "turns": products},
        "share_of_gemm_rate": {
            name: statistics.median(rate * flops / product for rate, product in zip(values, products, strict=True))
            for name, values in rates.items()
        },
        "loader_share_of_step": data_share,
    }


def crossing_s(curve: list[dict[str, float]], target: float) -> float | None:
    """Training seconds until the loss is first at the target, interpolated; None if never."""
    found = crossing([point["loss"] for point in curve], target)
    if found is None:
        return None
    before, now, share = curve[found[0]]["train_s"], curve[found[1]]["train_s"], found[2]
    return before + share * (now - before)


def tune(dim: int, steps: int, corpus: str, val_windows: int) -> dict[str, Any]:
    """The best learning rate of each arm by final validation loss, seed 100."""
    table: dict[str, dict[str, float]] = {}
    for arm in ARMS:
        say(f"tuning {arm} at d = {dim}: {', '.join(f'{lr:g}' for lr in RATES[arm])}")
        plan = [Settings(arm, dim, steps, lr, 100, steps, val_windows, corpus, 10, False) for lr in RATES[arm]]
        table[arm] = {f"{r['lr']:g}": r["curve"][-1]["loss"] for r in race(plan)}
    best = {arm: float(min(losses, key=lambda lr: losses[lr])) for arm, losses in table.items()}
    return {"steps": steps, "final_loss": table, "best_lr": best}


def to_loss(
    dim: int,
    steps: int,
    seeds: list[int],
    lr: dict[str, float],
    corpus: str,
    val_windows: int,
    compiled: dict[str, bool],
) -> dict[str, Any]:
    """Seconds until the Trainer's final loss, per seed."""
    per_seed = []
    for seed in seeds:
        say(f"time to loss at d = {dim}, seed {seed}: {steps} steps per arm")
        every = max(1, steps // 25)
        plan = [Settings(arm, dim, steps, lr[arm], seed, every, val_windows, corpus, 10, compiled[arm]) for arm in ARMS]
        results = race(plan)
        target = results[0]["curve"][-1]["loss"]
        entry: dict[str, Any] = {"seed": seed, "target_loss": target, "arms": {}}
        for result in results:
            seconds = crossing_s(result["curve"], target)
            own = result["arm"].startswith("trimtab")
            if seconds is not None and own:
                seconds += result["setup_s"]
            entry["arms"][result["arm"].replace("_compiled", "")] = {
                "lr": result["lr"],
                "compiled": result["arm"].endswith("_compiled"),
                "setup_s": result["setup_s"],
                "seconds_to_target": seconds,
                "final_loss": result["curve"][-1]["loss"],
                "train_s": result["curve"][-1]["train_s"],
                "curve": result["curve"],
            }
        first = entry["arms"]["hf_trainer"]["seconds_to_target"]
        entry["times_shorter"] = {
            name: first / body["seconds_to_target"] if body["seconds_to_target"] else None
            for name, body in entry["arms"].items()
        }
        per_seed.append(entry)
        say(f"seed {seed}: target {target:.4f}, {entry['times_shorter']}")
    ratios = [entry["times_shorter"]["trimtab"] for entry in per_seed]
    reached = [ratio for ratio in ratios if ratio is not None]
    summary = {"median": statistics.median(reached), "low": min(reached), "high": max(reached)} if reached else None
    return {
        "dim": dim,
        "steps": steps,
        "seeds": per_seed,
        "times_shorter_than_trainer": summary,
        "reached": len(reached),
    }


def machine_facts() -> dict[str, Any]:
    """What the figures depend on."""
    machine = probe()
    device = select_device(DeviceSection())
    return {
        "cpu": machine.cpu_model,
        "cores": machine.num_cores_usable,
        "instructions": list(machine.cpu_flags),
        "memory_bytes": machine.memory_total_bytes,
        "system": machine.system,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": __import__("transformers").__version__,
        "gemm_flops_per_s": {name: machine_peak(device, name).flops for name in ("fp32", "bf16")},
    }


def startup_s() -> float:
    """Seconds from the command to its first step, corpus cached: the median of three real runs."""
    found = []
    for number in range(3):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "trimtab.cli.main", "train", "--train.steps", "1", "--run.dir", folder]
            command += ["--run.name", str(number), "--train.compile", "off", "--json"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found.append(float(json.loads(done.stdout)["startup_s"]))
    return statistics.median(found)


def main() -> None:
    """Run the benchmark and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under five minutes; says nothing final")
    parser.add_argument("--steps", type=int, default=500, help="steps of a run to a loss [500]")
    parser.add_argument("--seeds", type=int, default=3, help="seeds [3]")
    parser.add_argument("--only", choices=("speed", "loss"), help="one part only")
    parser.add_argument("--output", type=Path, help="JSON file [results/time_to_loss[_quick].json]")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    corpus = prepare_corpus(DataSection(vocab_size=VOCAB_SIZE))
    result: dict[str, Any] = {
        "benchmark": "time_to_loss",
        "schema": 1,
        "quick": arguments.quick,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "machine": machine_facts(),
        "setting": {
            "corpus": "standard library source text",
            "train_tokens": corpus.num_train_tokens,
            "vocabulary": VOCAB_SIZE,
            "tokens_per_step": TOKENS_PER_STEP,
            "shapes": SHAPES,
        },
        "startup_s": startup_s(),
        "speed": [],
        "to_loss": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, shards in (("train", corpus.train), ("val", corpus.val)):
            np.save(Path(folder) / f"{name}.npy", np.concatenate([shard.tokens for shard in shards]))
        if arguments.only != "loss":
            result["speed"] = [speed(256, 3 if arguments.quick else 20, 5, folder)]
            if not arguments.quick:
                result["speed"].append(speed(512, 12, 3, folder))
        # For trimtab, whose compile time counts, compiling does not pay at these lengths; `auto` leaves it off too.
        compiled = dict.fromkeys(ARMS, False)
        if arguments.only != "speed":
            if arguments.quick:
                rates = {"hf_trainer": 2e-3, "plain_loop": 2e-3, "trimtab": 4e-3}
                result["to_loss"] = [to_loss(256, 80, [0], rates, folder, 48, compiled)]
            else:
                if arguments.only is None:
                    rates = {name: body["median"] for name, body in result["speed"][0]["tokens_per_s"].items()}
                    for arm in ("hf_trainer", "plain_loop"):  # each peer in its faster form
                        compiled[arm] = rates[f"{arm}_compiled"] > rates[arm]
                tuned = tune(256, arguments.steps // 2, folder, 160)
                result["tuning"] = tuned
                seeds = list(range(arguments.seeds))
                result["to_loss"] = [to_loss(256, arguments.steps, seeds, tuned["best_lr"], folder, 160, compiled)]
    name = "time_to_loss_quick.json" if arguments.quick else "time_to_loss.json"
    output = arguments.output or RESULTS / name
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for entry in result["speed"]:
        low, high = entry["ratio"]["low"], entry["ratio"]["high"]
        own = entry["best_own"]
        shares, median = entry["share_of_gemm_rate"][own], entry["tokens_per_s"][own]["median"]
        print(
            f"d = {entry['dim']}: {own} {median:,.0f} tokens/s, "
            f"{entry['ratio']['median']:.2f} times {entry['best_peer']} ({low:.2f} to {high:.2f}); "
            f"{shares:.0%} of the GEMM rate; loader {entry['loader_share_of_step']:.2%} of a step"
        )
    for entry in result["to_loss"]:
        found = entry["times_shorter_than_trainer"]
        if found:
            print(
                f"d = {entry['dim']}: the Trainer's final loss {found['median']:.2f} times sooner "
                f"({found['low']:.2f} to {found['high']:.2f}, {entry['reached']} of {len(entry['seeds'])} seeds)"
            )
    print(f"start-up to the first step: {result['startup_s']:.1f} s\nwritten: {output}")


if __name__ == "__main__":
    main()
