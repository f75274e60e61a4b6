"""A keyed pseudo-random permutation: the n-th window of an epoch in O(1) memory, without a shuffled list.

How: an index x in [0, n) is written as (x mod a, x div a) with a about sqrt(n); six Feistel rounds add a keyed hash of
one half to the other, modulo that half's size, which is a bijection of a*b >= n whatever the hash (Black and Rogaway,
"Ciphers with arbitrary finite domains", 2002). Values that land at n or above are walked on until they are below n.
As a*b < n + a, almost none are. The key is BLAKE2b of (seed, epoch), so nothing depends on numpy's generators.

Rejected: `rng.permutation(n)` (8 bytes per window on each rank, and its output may change between numpy versions);
a power-of-two domain (up to four walks on average). Limits: a shuffle for training, no cryptography.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt

_ROUNDS = 6
_MULTIPLIER_1 = np.uint64(0xFF51AFD7ED558CCD)  # the 64-bit finalizer of MurmurHash3 (A. Appleby, public domain)
_MULTIPLIER_2 = np.uint64(0xC4CEB9FE1A85EC53)
_SHIFT = np.uint64(33)


def _mix(values: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    values = (values ^ key) * _MULTIPLIER_1
    values ^= values >> _SHIFT
    values *= _MULTIPLIER_2
    values ^= values >> _SHIFT
    return values


def permute(indices: npt.NDArray[np.int64], size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Where each of `indices` (all in [0, size)) lands in the permutation of [0, size) keyed by (seed, epoch).

    >>> sorted(permute(np.arange(5), 5, seed=1, epoch=0).tolist())
    [0, 1, 2, 3, 4]
    """
    assert size > 0
    raw = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    keys = np.frombuffer(raw, dtype="<u8").astype(np.uint64)
    side = math.isqrt(size - 1) + 1
    a, b, n = np.uint64(side), np.uint64(-(-size // side)), np.uint64(size)

    def once(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values % a, values // a
        for number, key in enumerate(keys):
            if number % 2:
                right = (right + _mix(left, key) % b) % b
            else:
                left = (left + _mix(right, key) % a) % a
        return left + a * right

    values = once(indices.astype(np.uint64))
    outside = np.flatnonzero(values >= n)
    while outside.size:
        values[outside] = once(values[outside])
        outside = outside[values[outside] >= n]
    return values.astype(np.int64)
