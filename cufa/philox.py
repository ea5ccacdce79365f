"""Dropout's random numbers, which are a function of their place: Philox4x32-10 (Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3", section 4.3).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cufa.rounding import ceil_div

Array: TypeAlias = npt.NDArray[Any]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW_WORD = 0xFFFFFFFF


def philox(counter: tuple[Any, Any, Any, Any], seed: int) -> tuple[Array, Array, Array, Array]:
    """Four random 32-bit words for every counter.

    Args:
        counter: four 32-bit words, integers or arrays that broadcast.
        seed: the key, 64 bits.

    Returns:
        Four arrays of uint64 with values below 2**32.
    """
    a, b, c, d = (np.asarray(word, np.uint64) for word in counter)
    keys = [seed & _LOW_WORD, seed >> 32]
    low_word, word_bits = np.uint64(_LOW_WORD), np.uint64(32)
    for _ in range(_ROUNDS):
        first, second = np.uint64(_MULTIPLIERS[0]) * a, np.uint64(_MULTIPLIERS[1]) * c
        a = (second >> word_bits) ^ b ^ np.uint64(keys[0])
        c = (first >> word_bits) ^ d ^ np.uint64(keys[1])
        b, d = second & low_word, first & low_word
        keys = [(key + step) & _LOW_WORD for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return a, b, c, d


def kept(dropout_p: float, seed: int, offset: int, matrix: int, rows: slice, keys: slice) -> Array:
    """Which probabilities dropout keeps: (rows, keys) of bool.

    One counter serves two rows and two keys.

    Args:
        dropout_p: which part is dropped.
        seed: which random numbers, 64 bits.
        offset: which sequence of them, 32 bits.
        matrix: the number of the head among those of all sequences.
        rows: from where to where in the sequence.
        keys: likewise.
    """
    i = np.arange(rows.start // 2, ceil_div(rows.stop, 2))[:, None]
    j = np.arange(keys.start // 2, ceil_div(keys.stop, 2))
    quads = np.stack(philox((j, i, matrix, offset), seed)) >= dropped_below(dropout_p)
    of_pairs = quads.reshape(2, 2, len(i), len(j))  # (row % 2, key % 2, row // 2, key // 2)
    kept: Array = of_pairs.transpose(2, 0, 3, 1).reshape(2 * len(i), 2 * len(j))
    first_row, first_key = rows.start % 2, keys.start % 2
    return kept[first_row:, first_key:][: rows.stop - rows.start, : keys.stop - keys.start]


def dropped_below(dropout_p: float) -> int:
    """The random word below which a probability is dropped."""
    return min(round(dropout_p * 2**32), 2**32 - 1)
