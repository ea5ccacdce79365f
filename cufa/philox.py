"""Dropout's random numbers, a function of position: Philox4x32-7 (Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3", section 4.3; table 2: seven rounds pass all tests).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cufa.integers import ceil_div

Array: TypeAlias = npt.NDArray[Any]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 7
_LOW_WORD = 0xFFFFFFFF
_NUMBERS = 2**15  # the range of dropout's random numbers


def philox(counter: tuple[Any, Any, Any, Any], seed: int) -> tuple[Array, Array, Array, Array]:
    """Compute four random 32-bit words for every counter.

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

    One counter serves eight probabilities: rows i, i + 1 and keys j, j + 1, j + 8, j + 9. A word serves two
    keys, its lower half the even one. The lower 15 bits of each half are used.

    Args:
        dropout_p: fraction that is dropped.
        seed: seed of the random numbers, 64 bits.
        offset: which sequence of random numbers, 32 bits.
        matrix: the number of the head, counted over all sequences.
        rows: range of rows in the sequence.
        keys: range of keys in the sequence.
    """
    first_row, first_key = rows.start // 2 * 2, keys.start // 16 * 16
    i = np.arange(first_row // 2, ceil_div(rows.stop, 2))[:, None]
    j = np.arange(first_key // 4, ceil_div(keys.stop, 16) * 4)
    words = np.stack(philox((j, i, matrix, offset), seed))
    numbers = np.stack((words, words >> np.uint64(16))) & np.uint64(_NUMBERS - 1)
    # (key % 2, row % 2, key // 8 % 2, row // 2, key // 16, key % 8 // 2)
    eights = (numbers >= dropped_below(dropout_p)).reshape(2, 2, 2, len(i), len(j) // 4, 4)
    kept: Array = eights.transpose(3, 1, 4, 2, 5, 0).reshape(2 * len(i), 4 * len(j))
    return kept[rows.start - first_row :, keys.start - first_key :][
        : rows.stop - rows.start, : keys.stop - keys.start
    ]


def dropped_below(dropout_p: float) -> int:
    """The 15-bit random number below which a probability is dropped."""
    return min(round(dropout_p * _NUMBERS), _NUMBERS - 1)


def kept_carry(dropout_p: float) -> int:
    """A number, for both halves of a word, whose sum with kept random numbers overflows their 15 bits."""
    return (_NUMBERS - dropped_below(dropout_p)) * 0x00010001


def kept_scale(dropout_p: float) -> float:
    """The factor for kept probabilities, which preserves the mean."""
    return _NUMBERS / (_NUMBERS - dropped_below(dropout_p))
