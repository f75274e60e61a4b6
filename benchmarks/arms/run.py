"""`python run.py SETTINGS_JSON`: one arm in its own process."""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from common import Settings


def main() -> None:
    """Dispatch by the arm's name."""
    settings = Settings(**json.loads(sys.argv[1]))
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if settings.arm == "hf_trainer":
        import hf_trainer

        hf_trainer.run(settings)
    elif settings.arm == "plain_loop":
        import plain_loop

        plain_loop.run(settings)
    else:
        import trimtab_arm

        plain = {"schedule.name": "cosine", "schedule.warmup_fraction": "0.05"}
        trimtab_arm.run(settings, trimtab_arm.SCHEDULE if settings.arm == "trimtab" else plain)


if __name__ == "__main__":
    main()
