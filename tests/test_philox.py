"""Dropout's random numbers: the published answers, their places, and that they look random."""

import numpy as np
import pytest

from cufa import philox

ALL_ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "seed", "words"),
    [
        ((0, 0, 0, 0), 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((ALL_ONES,) * 4, 2**64 - 1, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_known_answers(counter: tuple[int, int, int, int], seed: int, words: tuple[int, ...]) -> None:
    """The vectors that the algorithm's authors publish (Random123, kat_vectors, philox4x32 7)."""
    assert tuple(int(word) for word in philox.philox(counter, seed)) == words


def test_the_word_of_a_place() -> None:
    seed, offset, matrix = 0x0123456789ABCDEF, 77, 5
    rows, keys = slice(3, 10), slice(6, 37)
    kept = philox.kept(0.4, seed, offset, matrix, rows, keys)
    assert kept.shape == (7, 31)
    for i in range(3, 10):
        for j in range(6, 37):
            words = philox.philox((j // 16 * 4 + j % 8 // 2, i // 2, matrix, offset), seed)
            number = int(words[2 * (i % 2) + j // 8 % 2]) >> 16 * (j % 2) & 0x7FFF
            assert kept[i - 3, j - 6] == (number >= round(0.4 * 2**15))


@pytest.mark.parametrize("rows", [slice(0, 0), slice(0, 1), slice(5, 5), slice(3, 8)])
@pytest.mark.parametrize("keys", [slice(0, 0), slice(1, 2), slice(4, 9), slice(15, 49)])
def test_tiles_are_parts_of_the_whole(rows: slice, keys: slice) -> None:
    whole = philox.kept(0.5, 1, 2, 3, slice(0, 20), slice(0, 50))
    np.testing.assert_array_equal(philox.kept(0.5, 1, 2, 3, rows, keys), whole[rows, keys])


@pytest.mark.parametrize("dropout_p", [0.01, 0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_are_asked_for(dropout_p: float) -> None:
    kept = philox.kept(dropout_p, 2**63 + 1, 0, 0, slice(0, 1000), slice(0, 1000))
    standard_deviation = (dropout_p * (1 - dropout_p) * kept.size) ** 0.5
    assert abs(np.count_nonzero(~kept) - dropout_p * kept.size) < 4 * standard_deviation


def test_next_to_all_are_dropped() -> None:
    assert philox.dropped_below(np.nextafter(1, 0)) == 2**15 - 1
    assert philox.dropped_below(0.5) == 2**14


@pytest.mark.parametrize("dropout_p", [0.0, 1e-6, 0.1, 0.5, 0.9999, np.nextafter(1, 0)])
def test_means_stay_what_they_were(dropout_p: float) -> None:
    kept = 1 - philox.dropped_below(dropout_p) / 2**15
    assert philox.kept_scale(dropout_p) * kept == pytest.approx(1, rel=1e-15)
    assert kept == pytest.approx(1 - dropout_p, abs=2.0**-15)


def test_rows_keys_heads_seeds_and_offsets_have_nothing_in_common() -> None:
    """Correlations of a million pairs of independent bits have a standard deviation of 1/1000."""

    def draw(seed: int = 9, offset: int = 4, matrix: int = 2) -> np.ndarray:
        kept = philox.kept(0.5, seed, offset, matrix, slice(0, 1001), slice(0, 1001))
        return 2 * kept.astype(np.int64) - 1

    base = draw()[:-1, :-1]
    others = {
        "next row": draw()[1:, :-1],
        "next key": draw()[:-1, 1:],
        "eight keys on": np.roll(draw(), -8, 1)[:-1, :-1],
        "rows for keys": draw().T[:-1, :-1],
        "next head": draw(matrix=3)[:-1, :-1],
        "next offset": draw(offset=5)[:-1, :-1],
        "head for offset": draw(offset=2, matrix=4)[:-1, :-1],
        "next seed": draw(seed=10)[:-1, :-1],
        "seed's high word": draw(seed=9 + 2**32)[:-1, :-1],
    }
    for what, other in others.items():
        assert abs((base * other).mean()) < 4e-3, what
