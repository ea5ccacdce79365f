"""Dropout's random numbers: the published answers, their places, and that they look random."""

import numpy as np
import pytest

from cufa import philox

ALL_ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "seed", "words"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ALL_ONES,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, int, int, int], seed: int, words: tuple[int, ...]) -> None:
    """The vectors that the algorithm's authors publish (Random123, kat_vectors, philox4x32 10)."""
    assert tuple(int(word) for word in philox.philox(counter, seed)) == words


def test_the_word_of_a_place() -> None:
    seed, offset, matrix = 0x0123456789ABCDEF, 77, 5
    rows, keys = slice(3, 10), slice(6, 17)
    kept = philox.kept(0.4, seed, offset, matrix, rows, keys)
    assert kept.shape == (7, 11)
    for i in range(3, 10):
        for j in range(6, 17):
            words = philox.philox((j // 2, i // 2, matrix, offset), seed)
            assert kept[i - 3, j - 6] == (words[2 * (i % 2) + j % 2] >= round(0.4 * 2**32))


@pytest.mark.parametrize("rows", [slice(0, 0), slice(0, 1), slice(5, 5), slice(3, 8)])
@pytest.mark.parametrize("keys", [slice(0, 0), slice(1, 2), slice(4, 9)])
def test_tiles_are_parts_of_the_whole(rows: slice, keys: slice) -> None:
    whole = philox.kept(0.5, 1, 2, 3, slice(0, 20), slice(0, 20))
    np.testing.assert_array_equal(philox.kept(0.5, 1, 2, 3, rows, keys), whole[rows, keys])


@pytest.mark.parametrize("dropout_p", [0.01, 0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_are_asked_for(dropout_p: float) -> None:
    kept = philox.kept(dropout_p, 2**63 + 1, 0, 0, slice(0, 1000), slice(0, 1000))
    standard_deviation = (dropout_p * (1 - dropout_p) * kept.size) ** 0.5
    assert abs(np.count_nonzero(~kept) - dropout_p * kept.size) < 4 * standard_deviation


def test_next_to_all_are_dropped() -> None:
    assert philox.dropped_below(np.nextafter(1, 0)) == 2**32 - 1
    assert philox.dropped_below(0.5) == 2**31


def test_rows_keys_heads_seeds_and_offsets_have_nothing_in_common() -> None:
    """Correlations of a million pairs of independent bits have a standard deviation of 1/1000."""

    def draw(seed: int = 9, offset: int = 4, matrix: int = 2) -> np.ndarray:
        kept = philox.kept(0.5, seed, offset, matrix, slice(0, 1001), slice(0, 1001))
        return 2 * kept.astype(np.int64) - 1

    base = draw()[:-1, :-1]
    others = {
        "next row": draw()[1:, :-1],
        "next key": draw()[:-1, 1:],
        "rows for keys": draw().T[:-1, :-1],
        "next head": draw(matrix=3)[:-1, :-1],
        "next offset": draw(offset=5)[:-1, :-1],
        "head for offset": draw(offset=2, matrix=4)[:-1, :-1],
        "next seed": draw(seed=10)[:-1, :-1],
        "seed's high word": draw(seed=9 + 2**32)[:-1, :-1],
    }
    for what, other in others.items():
        assert abs((base * other).mean()) < 4e-3, what
