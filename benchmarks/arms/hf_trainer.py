"""Arm (a): Hugging Face `Trainer` at its best settings: bf16, fused AdamW, cosine, no needless logging or saving."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from common import BATCH_SEQUENCES, SEQUENCE_LENGTH, SHAPES, VOCAB_SIZE, Clock, Settings, windows
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Windows(torch.utils.data.Dataset):
    """Rows of the token stream; `labels` are shifted inside the model."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows.shape[0]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index, :-1]
        return {"input_ids": row, "labels": row}


class Turns(TrainerCallback):
    """Puts the common clock round each step. Fetching the batch lies outside it, in the Trainer's favour."""

    def __init__(self, clock: Clock, warm_up: int) -> None:
        self.clock, self.left = clock, warm_up

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if self.left == 0:
            self.clock.wait_for_turn()
        self.clock.start()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self.left:
            self.left -= 1
            self.clock.setup_s += time.perf_counter() - self.clock._began
        else:
            self.clock.stop()


def run(settings: Settings) -> None:
    """Train one model and print the result line."""
    torch.manual_seed(settings.seed)
    shape = SHAPES[settings.dim]
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape["dim"],
        intermediate_size=shape["ffn_dim"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_heads"],
        max_position_embeddings=SEQUENCE_LENGTH,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    folder = Path(settings.corpus)
    arguments = TrainingArguments(
        output_dir=str(folder / "hf"),
        max_steps=settings.steps + (1 if settings.compiled else 0),
        torch_compile=settings.compiled,
        per_device_train_batch_size=BATCH_SEQUENCES,
        learning_rate=settings.lr,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, settings.steps // 20),
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        bf16=True,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_num_workers=0,
        seed=settings.seed,
        data_seed=settings.seed,
    )
    val = windows(folder / "val.npy")[: settings.val_windows]

    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        model.eval()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=tokens).logits
        model.train()
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")

    clock = Clock(settings, loss_of, val)
    rows = Windows(windows(folder / "train.npy"))
    # The Trainer compiles inside its first step, so with compilation that step counts as set-up, not as training.
    turns = Turns(clock, warm_up=1 if settings.compiled else 0)
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[turns]).train()
    clock.print_result()
