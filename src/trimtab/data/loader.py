"""The order in which tokens are learned: a pure function of (seed, position).

How: the shards are one long stream of T tokens, cut into N = ceil(T / L) windows of L = `sequence_length`. An epoch
visits all N windows in an order permuted by (seed, epoch) (`order.py`). The state of training is one integer, the
global position in tokens: epoch = position // (N L), and so on. A batch is `num_tokens` from there on, as rows of S
tokens, where S divides L (sequence-length warm-up cuts windows into shorter rows and changes no order). Rank r of W
takes the r-th of W equal runs of rows, so the union over ranks is the same at any W, and a run may change W, S or
batch size at any step without repeating or dropping a token. Targets are the stream's next tokens, also across a row's
end. The last window of the stream is filled up with end-of-text tokens whose targets are `IGNORE`: every token of the
corpus is an input exactly once per epoch.

Packing: `stream` lets documents run on; `documents` adds a segment number per token (mask attention where they differ),
positions that restart at each document, and no target across a boundary.

Rejected: torchdata and worker processes (a batch costs microseconds; workers need pickled state and drain on resume),
best-fit packing (drops or pads tokens), shuffling shards and buffers (the order would depend on the number of readers).
Limits: a document longer than S is seen in rows; in `documents` packing its second row starts at position 0 too.

Shape legend: B rows of the batch on this rank, S tokens per row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab.core.errors import CheckpointError, ConfigError, DataError, refusal
from trimtab.data.index import TokenShard
from trimtab.data.order import permute

IGNORE = -100
"""Target where nothing is to be learned; PyTorch's default `ignore_index`."""
_ORDER_BLOCK = 1024
"""Windows whose order is worked out at a time: amortises numpy's cost per call."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """The rows of one rank for one step; all arrays are int64, writable and contiguous."""

    tokens: Ints
    """Input ids [B, S]."""
    targets: Ints
    """Next-token ids [B, S], `IGNORE` where there is none."""
    positions: Ints
    """Position of each token in its row, or in its segment with `documents` packing [B, S]."""
    segments: Ints | None
    """Segment number of each token in its row, from 0 [B, S]; None with `stream` packing (plain causal attention)."""
    row_starts: Ints
    """Where in the corpus stream each row starts, in tokens [B]; at or above its length for rows of padding."""

    @property
    def num_targets(self) -> int:
        """Targets that count in the loss."""
        return int(np.count_nonzero(self.targets != IGNORE))


class _Stream:
    """Shards as one array of tokens."""

    def __init__(self, shards: Sequence[TokenShard]) -> None:
        self.shards = tuple(shards)
        self.bounds: Ints = np.cumsum([0, *(shard.num_tokens for shard in shards)], dtype=np.int64)
        self.num_tokens = int(self.bounds[-1])
        if not self.num_tokens:
            raise DataError("The corpus has no tokens: add text.")
        self.eos_id = int(shards[0].eos_id)

    def gather(self, starts: Ints, length: int) -> Ints:
        """Tokens [rows, length] from each start; end-of-text beyond the end of the stream."""
        rows = np.empty((len(starts), length), dtype=np.int64)
        home = np.searchsorted(self.bounds, starts, side="right") - 1
        for number, (start, index) in enumerate(zip(starts.tolist(), home.tolist(), strict=True)):
            if index < len(self.shards):
                base = int(self.bounds[index])
                part = self.shards[index].tokens[start - base : start - base + length]
                rows[number, : len(part)] = part
            else:
                part = np.empty(0, dtype=np.uint16)
            if len(part) < length:
                self._continue(rows[number], index + 1, len(part))
        return rows

    def _continue(self, row: Ints, index: int, filled: int) -> None:
        while filled < len(row) and index < len(self.shards):
            part = self.shards[index].tokens[: len(row) - filled]
            row[filled : filled + len(part)] = part
            filled, index = filled + len(part), index + 1
        row[filled:] = self.eos_id

    def boundaries(self, starts: Ints, length: int) -> npt.NDArray[np.bool_]:
        """Whether a document (or the padding) starts at each of the tokens [rows, length]."""
        flags = np.zeros((len(starts), length), dtype=np.bool_)
        for shard, base in zip(self.shards, self.bounds[:-1].tolist(), strict=True):
            low = np.searchsorted(shard.document_starts, np.maximum(starts - base, 0).astype(np.uint64))
            high = np.searchsorted(shard.document_starts, np.maximum(starts - base + length, 0).astype(np.uint64))
            for row in np.flatnonzero(high > low).tolist():
                inside = shard.document_starts[low[row] : high[row]].astype(np.int64) + (base - int(starts[row]))
                flags[row, inside] = True
        ends = self.num_tokens - starts
        padded = np.flatnonzero((ends >= 0) & (ends < length))
        flags[padded, ends[padded]] = True
        return flags

    def batch(self, starts: Ints, length: int, packing: str) -> Batch:
        """The batch whose rows are the `length` tokens from each start."""
        rows = self.gather(starts, length + 1)
        tokens, targets = rows[:, :-1].copy(), rows[:, 1:].copy()
        if starts.size and int(starts.max()) + length >= self.num_tokens:
            targets[starts[:, None] + np.arange(1, length + 1) >= self.num_tokens] = IGNORE
        steps = np.arange(length, dtype=np.int64)
        if packing == "stream":
            return Batch(tokens, targets, np.tile(steps, (len(starts), 1)), None, starts)
        flags = self.boundaries(starts, length + 1)
        targets[flags[:, 1:]] = IGNORE
        inner = flags[:, :-1].copy()
        inner[:, 0] = False
        segments = np.cumsum(inner, axis=1, dtype=np.int64)
        positions = steps - np.maximum.accumulate(np.where(inner, steps, 0), axis=1)
        return Batch(tokens, targets, positions, segments, starts)

    def documents(self, batch: Batch) -> list[str]:
        """Ids of the documents that the rows touch, in order of appearance, each once."""
        names: dict[str, None] = {}
        length = batch.tokens.shape[1]
        for start in batch.row_starts.tolist():
            for shard, base in zip(self.shards, self.bounds[:-1].tolist(), strict=True):
                low, high = max(start - base, 0), min(start + length - base, shard.num_tokens)
                if low >= high:
                    continue
                first = int(np.searchsorted(shard.document_starts, np.uint64(low), side="right")) - 1
                last = int(np.searchsorted(shard.document_starts, np.uint64(high), side="left"))
                names.update(dict.fromkeys(shard.document_name(index) for index in range(first, last)))
        return list(names)


class Loader:
    """Training batches as a pure function of (seed, position).

    Args:
        shards: the training shards, in order.
        sequence_length: L, tokens per full sequence.
        seed: of the order.
        packing: `stream` or `documents`.
    """

    def __init__(self, shards: Sequence[TokenShard], sequence_length: int, seed: int, packing: str = "stream") -> None:
        if packing not in ("stream", "documents"):
            raise ConfigError(refusal("data.packing", packing, "must be one of stream, documents"))
        if sequence_length < 1:
            raise ConfigError(refusal("data.sequence_length", sequence_length, "must be at least 1"))
        self._stream = _Stream(shards)
        self.sequence_length, self.seed, self.packing = sequence_length, seed, packing
        self.num_windows = -(-self._stream.num_tokens // sequence_length)
        self._order: tuple[int, int, Ints] = (-1, -1, np.empty(0, dtype=np.int64))

    @property
    def num_tokens(self) -> int:
        """Tokens of the corpus, T."""
        return self._stream.num_tokens

    @property
    def epoch_tokens(self) -> int:
        """Positions of one epoch: T rounded up to whole windows."""
        return self.num_windows * self.sequence_length

    def _window_block(self, epoch: int, block: int) -> Ints:
        if self._order[:2] != (epoch, block):
            first = block * _ORDER_BLOCK
            indices = np.arange(first, min(first + _ORDER_BLOCK, self.num_windows), dtype=np.int64)
            self._order = (epoch, block, permute(indices, self.num_windows, self.seed, epoch))
        return self._order[2]

    def _windows(self, first: int, last: int) -> Ints:
        """Windows [first, last) of the endless sequence of epochs."""
        parts = []
        while first < last:
            epoch, inside = divmod(first, self.num_windows)
            block, offset = divmod(inside, _ORDER_BLOCK)
            part = self._window_block(epoch, block)[offset : offset + last - first]
            parts.append(part)
            first += len(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def batch(
        self, position: int, num_tokens: int, rank: int = 0, world_size: int = 1, sequence_length: int | None = None
    ) -> Batch:
        """The rows of one rank for the step that starts at a position.

        Args:
            position: tokens consumed so far, over all ranks; a multiple of the sequence length.
            num_tokens: tokens of this step, over all ranks (the next step starts at `position + num_tokens`).
            rank: data-parallel rank.
            world_size: number of data-parallel ranks.
            sequence_length: S, tokens per row; divides L. None: L.

        Raises:
            ConfigError: sizes that do not divide each other.
        """
        length = self.sequence_length if sequence_length is None else sequence_length
        if length < 1 or self.sequence_length % length:
            rule = f"must divide data.sequence_length = {self.sequence_length}"
            raise ConfigError(refusal("The warm-up's sequence length", length, rule))
        if position < 0 or position % length:
            rule = f"must be a multiple of the sequence length {length}"
            raise ConfigError(refusal("The position in the corpus", position, rule, "keep batches whole sequences"))
        num_rows, rest = divmod(num_tokens, length)
        if rest or num_rows < 1 or num_rows % world_size or not 0 <= rank < world_size:
            rule = f"must be a multiple of {world_size} ranks x {length} tokens per sequence = {world_size * length}"
            nearest_size = max(1, round(num_tokens / (world_size * length))) * world_size * length
            raise ConfigError(refusal("The batch in tokens", num_tokens, rule, f"try {nearest_size}"))
        per_rank = num_rows // world_size
        first = position // length + rank * per_rank
        split = self.sequence_length // length
        if split == 1:
            starts = self._windows(first, first + per_rank) * self.sequence_length
        else:
            rows = np.arange(first, first + per_rank, dtype=np.int64)
            windows = self._windows(first // split, (first + per_rank - 1) // split + 1)
            starts = windows[rows // split - first // split] * self.sequence_length + rows % split * length
        return self._stream.batch(starts, length, self.packing)

    def documents(self, batch: Batch) -> list[str]:
        """Ids of the documents that a batch touches, for fault reports."""
        return self._stream.documents(batch)


class BatchStream:
    """Successive batches of one rank: a `Loader` and a position.

    Args:
        loader: gives the batches.
        rank: data-parallel rank.
        world_size: number of data-parallel ranks.
    """

    def __init__(self, loader: Loader, rank: int = 0, world_size: int = 1) -> None:
        self.loader, self.rank, self.world_size = loader, rank, world_size
        self.position = 0
        """Tokens consumed so far, over all ranks."""

    def next(self, num_tokens: int, sequence_length: int | None = None) -> Batch:
        """The next step's rows for this rank (`num_tokens` over all ranks); moves on only if it succeeds."""
        batch = self.loader.batch(self.position, num_tokens, self.rank, self.world_size, sequence_length)
        self.position += num_tokens
        return batch

    def state_dict(self) -> dict[str, int]:
        """A few integers, the same on all ranks: the position, and what it means something for."""
        return {
            "position": self.position,
            "seed": self.loader.seed,
            "sequence_length": self.loader.sequence_length,
            "num_tokens": self.loader.num_tokens,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a saved state, at any number of ranks.

        Raises:
            CheckpointError: it was saved with another corpus, seed or sequence length.
        """
        own = self.state_dict()
        for name, field in (
            ("num_tokens", "The number of corpus tokens"),
            ("sequence_length", "data.sequence_length"),
            ("seed", "The seed of the data order"),
        ):
            if name not in state or state[name] != own[name]:
                raise CheckpointError(
                    refusal(
                        field,
                        own[name],
                        f"must be {state.get(name)}, as in the checkpoint",
                        "resume with the same data, or start a new run from its weights",
                    )
                )
        self.position = int(state["position"])


def validation_batches(
    shards: Sequence[TokenShard],
    sequence_length: int,
    num_tokens: int,
    batch_sequences: int,
    rank: int = 0,
    world_size: int = 1,
    packing: str = "stream",
) -> Iterator[Batch]:
    """Fixed windows, evenly spread over the held-out stream: the same ones at every evaluation.

    Args:
        shards: the validation shards.
        sequence_length: tokens per row.
        num_tokens: about how many tokens to evaluate, over all ranks; 0: all. Never more than there are.
        batch_sequences: rows of each batch on each rank. All batches have this shape: the last ones are filled up with
            rows whose targets are all `IGNORE`, so weigh a batch by `num_targets`.
        rank: data-parallel rank.
        world_size: number of ranks; all get the same number of batches.
        packing: `stream` or `documents`.
    """
    stream = _Stream(shards)
    num_windows = -(-stream.num_tokens // sequence_length)
    wanted = min(num_windows, -(-num_tokens // sequence_length)) if num_tokens else num_windows
    chosen = np.arange(wanted, dtype=np.int64) * num_windows // wanted * sequence_length
    group = batch_sequences * world_size
    filled = np.full(-(-wanted // group) * group, num_windows * sequence_length, dtype=np.int64)
    filled[:wanted] = chosen
    for first in range(rank * batch_sequences, len(filled), group):
        yield stream.batch(filled[first : first + batch_sequences], sequence_length, packing)
