"""What kernels are told of where tensors lie, beside what NumPy says."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from tolerance import DTYPES

import cufa
from cufa import tensor_layout
from cufa.problem import FLOAT8, INPUT_DTYPES, LAYOUTS, Features, Problem
from cufa.tensor_layout import (
    Region,
    contiguous_bias_lies_in_boxes,
    is_contiguous,
    layout_of,
    lies_in_boxes,
    lies_transposed,
    transposed,
)

PACKED = (None, 0, 1)


def numbered(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float16)


VIEWS = {
    "contiguous": numbered(2, 5, 3, 8),
    "heads first": numbered(2, 3, 5, 8).transpose(0, 2, 1, 3),
    "one of three": numbered(2, 5, 3, 3, 8)[:, :, 1],
    "every second row": numbered(2, 10, 3, 8)[:, ::2],
    "backwards": numbered(2, 5, 3, 8)[:, ::-1],
    "one head for all": np.broadcast_to(numbered(2, 5, 1, 8), (2, 5, 3, 8)),
    "rows with a gap": numbered(2, 5, 3, 11)[..., :8],
    "one row": numbered(2, 9, 3, 8)[:, 4:5],
    "one of each": numbered(3, 9, 7, 8)[1:2, 4:5, 2:3],
    "packed": numbered(7, 3, 8),
    "packed backwards": numbered(7, 3, 8)[::-1],
}


def described(*views):
    return tuple((view.shape, view.strides) for view in views)


@pytest.mark.parametrize("name", VIEWS)
def test_rows_are_where_numpy_has_them(name):
    view = VIEWS[name]
    axes = PACKED if view.ndim == 3 else LAYOUTS["bshd"]
    layout = layout_of(described(view), view.itemsize, axes)
    address, *strides = layout.fields([view.ctypes.data])
    distances = []
    for place in itertools.product(*(range(size) for size in view.shape[:-1])):
        walked = [0 if axis is None else place[axis] for axis in axes]
        distances.append(view[place].ctypes.data - view.ctypes.data)
        assert address + view.itemsize * np.dot(walked, strides) == view[place].ctypes.data
    assert all(distance % layout.align_bytes == 0 for distance in distances)
    assert layout.align_bytes == 16 or any(distance % (2 * layout.align_bytes) for distance in distances)
    assert layout.ascending == (min(distances) >= 0)
    assert layout.scattered == ()


def test_the_axes_of_a_layout():
    bshd = numbered(2, 5, 3, 8)
    bhsd = numbered(2, 3, 5, 8)
    assert layout_of(described(bshd), 2, LAYOUTS["bshd"]).places == (0, 120, 24, 8)
    assert layout_of(described(bhsd), 2, LAYOUTS["bhsd"]).places == (0, 120, 8, 40)
    assert layout_of(described(bshd[0]), 2, PACKED).places == (0, 0, 24, 8)
    both = layout_of(described(bshd[0], bshd), 2, (PACKED, LAYOUTS["bshd"]))
    assert both.places == (0, 0, 24, 8, 0, 120, 24, 8)


def test_tensors_that_are_not_there_yet_are_contiguous():
    there, missing = numbered(2, 5, 3, 8), (2, 5, 3, 8)
    both = layout_of((*described(there), (missing, None)), 2, LAYOUTS["bshd"])
    assert both.places[:4] == both.places[4:]
    assert both.fields([1000, 2000]) == [1000, 120, 24, 8, 2000, 120, 24, 8]


def test_tensors_whose_last_axis_is_not_contiguous_are_copied():
    contiguous, one_column = numbered(2, 5, 3, 8), numbered(2, 5, 3, 4)[..., 2:3]
    fortran, reversed_ = np.asfortranarray(contiguous), contiguous[..., ::-1]
    layout = layout_of(described(contiguous, fortran, one_column, reversed_, contiguous), 2, LAYOUTS["bshd"])
    assert layout.scattered == (1, 3)
    assert layout.places[4:8] == layout.places[12:16] == layout.places[:4]
    assert layout.places[8:12] == (0, 60, 12, 4)
    assert layout.ascending


def test_addresses_count_for_the_alignment():
    layout = layout_of(described(VIEWS["contiguous"]), 2, LAYOUTS["bshd"])
    assert [layout.alignment([512, 512 + offset]) for offset in (0, 32, 8, 6, 1)] == [16, 16, 8, 2, 1]


@pytest.mark.parametrize("name", VIEWS)
def test_contiguous_is_what_numpy_calls_so(name):
    for view in (VIEWS[name], VIEWS[name].T, VIEWS[name][:0], VIEWS[name][..., 0], VIEWS[name][0, 0, 0]):
        assert is_contiguous(view.shape, view.strides, view.itemsize) == view.flags.c_contiguous


def random_view(rng, memory):
    """A view of any shape, strides and dtype, its strides no multiples of anything in particular."""
    while True:
        dtype = rng.choice(["u1", "f2", "f4", "f8"])
        shape = tuple(int(n) for n in rng.choice([0, 1, 2, 3, 4], rng.integers(0, 5), p=[0.02, *4 * [0.245]]))
        strides = tuple(int(s) for s in rng.integers(-16, 17, len(shape)) * rng.choice([1, 2, 4]))
        offset = int(rng.integers(0, memory.size))
        try:
            return np.ndarray(shape, dtype, memory, offset, strides)
        except ValueError:  # it would reach beyond the memory
            continue


def region(view):
    return Region(view.ctypes.data, view.shape, view.strides, view.itemsize)


def bytes_of_elements(view):
    """The addresses of each element's bytes."""
    start = view.ctypes.data
    offsets = (
        sum(i * stride for i, stride in zip(index, view.strides, strict=True))
        for index in itertools.product(*map(range, view.shape))
    )
    return [set(range(start + offset, start + offset + view.itemsize)) for offset in offsets]


def test_span_by_brute_force():
    rng = np.random.default_rng(4)
    memory = np.zeros(128, np.uint8)
    for _ in range(1000):
        view = random_view(rng, memory)
        reached = set().union(*bytes_of_elements(view))
        start = view.ctypes.data
        assert region(view).span == ((min(reached), max(reached) + 1) if reached else (start, start))


def test_overlap_by_brute_force():
    rng = np.random.default_rng(1)
    memory = np.zeros(128, np.uint8)
    seen = {True: 0, False: 0}
    for _ in range(4000):
        a, b = random_view(rng, memory), random_view(rng, memory)
        expected = bool(set().union(*bytes_of_elements(a)) & set().union(*bytes_of_elements(b)))
        first, second = region(a), region(b)
        assert first.overlaps(second) == second.overlaps(first) == expected, (first, second)
        seen[expected] += 1
    assert min(seen.values()) > 500


def test_overlaps_itself_by_brute_force():
    """It may err, but only towards refusing, and never for a view that slicing can make."""
    rng = np.random.default_rng(2)
    memory = np.zeros(128, np.uint8)
    seen = {True: 0, False: 0}
    for _ in range(4000):
        a = random_view(rng, memory)
        elements = bytes_of_elements(a)
        shared = sum(map(len, elements)) > len(set().union(*elements))
        assert region(a).overlaps_itself or not shared, (a.shape, a.strides)
        seen[shared] += 1
    assert min(seen.values()) > 500


@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_of_an_array_do_not_overlap_themselves(dtype):
    rng = np.random.default_rng(3)
    for _ in range(300):
        shape = rng.integers(0, 5, 4)
        array = np.zeros(shape, dtype).transpose(rng.permutation(4))
        steps = rng.choice([-3, -2, -1, 1, 2, 3], 4)
        view = array[tuple(slice(None, None, int(step)) for step in steps)]
        assert not region(view).overlaps_itself, (view.shape, view.strides)


def test_broadcast_and_sliding_views_overlap_themselves():
    array = np.zeros((3, 4), np.float32)
    assert region(np.broadcast_to(array, (2, 3, 4))).overlaps_itself
    assert region(np.broadcast_to(array[:, :1], (3, 4))).overlaps_itself
    assert region(np.lib.stride_tricks.sliding_window_view(array[0], 2)).overlaps_itself
    assert not region(np.broadcast_to(array, (1, 3, 4))).overlaps_itself


def test_views_without_elements_overlap_nothing():
    array = np.zeros((3, 4), np.float32)
    for empty in (array[:0], array[1:1, 1:], array[:, 2:2]):
        assert not region(array).overlaps(region(empty))
        assert not region(empty).overlaps(region(array))
        assert not region(empty).overlaps(region(empty))
    assert not region(np.broadcast_to(np.zeros((0, 1), np.float32), (0, 5))).overlaps_itself


@pytest.mark.parametrize("dtype", DTYPES)
def test_interleaved_heads_do_not_overlap(dtype):
    packed = np.zeros((2, 5, 3, 4, 8), dtype)
    q, k, v = (packed[:, :, i] for i in range(3))
    assert not region(q).overlaps(region(k))
    assert not region(k).overlaps(region(v))
    assert region(q).overlaps(region(packed))
    assert region(packed[:, :, :2]).overlaps(region(k))
    assert region(q).overlaps(region(q))


def test_overlap_of_large_arrays_is_found_at_once():
    """The question is NP-hard in general; for the strides that arrays have it must not show."""
    _, seqlen, heads, head_dim = shape = (2**10, 2**20, 2**7, 2**7)
    row = 3 * heads * head_dim * 2
    by_row = (seqlen * row, row, head_dim * 2, 2)  # a row is its heads of q, then of k, then of v
    by_head = (seqlen * row, row, 3 * head_dim * 2, 2)  # a head is its q, its k and its v
    for strides, next_one in ((by_row, heads * head_dim * 2), (by_head, head_dim * 2)):
        q, k = (Region(2**46 + offset, shape, strides, 2) for offset in (0, next_one))
        assert not q.overlaps(k)
        assert q.overlaps(q)
        assert not q.overlaps_itself


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("order", [(3, 2, 1, 0), (3, 1, 2, 0)], ids=["bshd", "bhsd"])
def test_slices_side_by_side_in_padded_memory_are_told_apart_at_once(monkeypatch, axis, order):
    """Whatever the padding, by which the strides have no common factor."""
    monkeypatch.setattr(tensor_layout, "_MOST_DISTANCES", 8)
    shape = (24, 16955, 55, 240)
    for half in ("first", "every second"):
        strides, length = [0, 0, 0, 0], 2
        for number, place in enumerate(order):
            strides[place] = length
            length = length * shape[place] * (2 if place == axis else 1) + 2 * (7 * number + 3)
        step = strides[axis] * (shape[axis] if half == "first" else 1)
        if half == "every second":
            strides[axis] *= 2
        one, other = (Region(2**46 + offset, shape, tuple(strides), 2) for offset in (0, step))
        assert not one.overlaps(other)
        assert not other.overlaps(one)
        assert one.overlaps(Region(2**46 + strides[axis], shape, tuple(strides), 2))


def test_what_would_take_long_to_tell_apart_counts_as_overlapping():
    """All strides are even, the distance is odd, and that is not looked for."""
    one, other = (Region(2**46 + far, (10**5,), (stride,), 1) for far, stride in ((0, 20014), (1, 20018)))
    assert one.overlaps(other)
    assert other.overlaps(one)
    few = [array._replace(shape=(100,)) for array in (one, other)]
    assert not few[0].overlaps(few[1])


def bytes_of(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.uint8)


@pytest.mark.parametrize(
    ("values", "lies"),
    [
        (bytes_of(2, 3, 8, 32).transpose(0, 3, 1, 2), True),
        (bytes_of(2, 8, 3, 32).transpose(0, 3, 2, 1), True),
        (bytes_of(2, 3, 8, 32)[..., :20].transpose(0, 3, 1, 2), True),
        (bytes_of(2, 3, 8, 32)[..., :18].transpose(0, 3, 1, 2), False),  # keys that make no four
        (bytes_of(2, 3, 8, 20).transpose(0, 3, 1, 2), False),  # strides of 20 bytes
        (bytes_of(2, 3, 8, 32)[:, :, ::-1].transpose(0, 3, 1, 2), False),
        (bytes_of(2, 3, 1, 32).transpose(0, 3, 1, 2), False),  # one column: rows are as good
        (bytes_of(2, 32, 3, 8), False),
        (bytes_of(2, 32, 3, 128)[..., ::16], False),  # nothing is adjacent
    ],
)
def test_values_that_lie_transposed(values, lies):
    batch, seqlen_k, kv_heads, value_dim = values.shape
    problem = Problem("forward", FLOAT8, batch, 5, seqlen_k, kv_heads, kv_heads, 16, value_dim)
    (storage,) = described(values)
    assert lies_transposed(problem, storage, LAYOUTS["bshd"]) == lies
    in_bhsd = values.swapaxes(1, 2)
    assert lies_transposed(problem, *described(in_bhsd), LAYOUTS["bhsd"]) == lies
    assert transposed(storage, LAYOUTS["bshd"]) == described(values.swapaxes(1, 3))[0]
    assert transposed(*described(in_bhsd), LAYOUTS["bhsd"]) == described(in_bhsd.swapaxes(2, 3))[0]


def test_of_what_no_values_are_read_transposed():
    storage = described(bytes_of(2, 3, 8, 32).transpose(0, 3, 1, 2))[0]
    problem = Problem("forward", FLOAT8, 2, 5, 32, 3, 3, 16, 8)
    assert lies_transposed(problem, storage, LAYOUTS["bshd"])
    assert not lies_transposed(replace(problem, head_dim=24), storage, LAYOUTS["bshd"])
    halves = described(numbered(2, 3, 8, 32).transpose(0, 3, 1, 2))[0]
    assert not lies_transposed(replace(problem, dtype="float16"), halves, LAYOUTS["bshd"])
    for other in (
        replace(problem, features=Features(packed=True)),
        replace(problem, features=Features(page_size=16)),
    ):
        assert not lies_transposed(other, storage, LAYOUTS["bshd"])
    assert not lies_transposed(problem, (storage[0], None), LAYOUTS["bshd"])


# Biases of scores (2, 4, 33, 40), with an address, and whether the copy engine can bring boxes of them.
BIASES = {
    "contiguous": (np.empty((2, 4, 33, 40), np.float16), 0, True),
    "one row for all": (np.empty((2, 1, 1, 40), np.float16), 0, True),
    "one row": (np.empty(40, np.float16), 0, True),
    "fewer axes": (np.empty((33, 40), np.float16), 0, True),
    "of a larger array": (np.empty((3, 4, 40, 48), np.float16)[1:, ::2, 3:36, :40], 0, True),
    "broadcast heads": (np.broadcast_to(np.empty((2, 1, 33, 40), np.float16), (2, 4, 33, 40)), 0, True),
    "broadcast rows": (np.broadcast_to(np.empty((2, 4, 1, 40), np.float16), (2, 4, 33, 40)), 0, False),
    "at an odd address": (np.empty((2, 4, 33, 40), np.float16), 8, False),
    "rows of an odd length": (np.empty((2, 4, 33, 41), np.float16), 0, False),
    "rows backwards": (np.empty((2, 4, 33, 40), np.float16)[:, :, ::-1], 0, False),
    "keys backwards": (np.empty((2, 4, 33, 40), np.float16)[..., ::-1], 0, False),
    "32 bits": (np.empty((2, 4, 33, 40), np.float32), 0, False),
    "nothing": (np.empty((2, 0, 33, 40), np.float16), 0, False),
}


@pytest.mark.parametrize(("bias", "address", "lies"), BIASES.values(), ids=BIASES)
def test_biases_that_lie_in_boxes(bias, address, lies):
    assert lies_in_boxes(Region(address, bias.shape, bias.strides, bias.itemsize)) == lies


@pytest.mark.parametrize(
    ("shape", "dtype", "lies"),
    [
        ((1, 4, 33, 40), "bfloat16", True),
        ((1, 4, 33, 41), "bfloat16", False),
        ((2, 1, 1, 41), "float16", False),
        ((1, 1, 1, 41), "float16", True),
        ((1, 4, 33, 40), "float32", False),
    ],
)
def test_contiguous_biases_that_lie_in_boxes(shape, dtype, lies):
    bias = np.empty(shape, INPUT_DTYPES[dtype])
    q, k = (np.empty((2, seqlen, 4, 64), INPUT_DTYPES["bfloat16"]) for seqlen in (33, shape[-1]))
    problem = cufa.plan(q, k, k, bias=bias, arch="sm_90a").problem
    assert problem.bias_boxes == contiguous_bias_lies_in_boxes(problem) == lies
    without = cufa.plan(q, k, k, arch="sm_90a").problem
    assert not without.bias_boxes
    assert not contiguous_bias_lies_in_boxes(without)


def test_a_plan_is_for_arrays_as_they_lie():
    """As a call with them, whose workspace it sizes."""
    rows = np.empty((1, 40, 2, 129), INPUT_DTYPES["bfloat16"])
    q = np.empty((1, 40, 2, 128), rows.dtype)
    for k, align_bytes, ascending in ((q, 16, True), (rows[..., :128], 2, True), (q[:, ::-1], 16, False)):
        problem = cufa.plan(q, k, k, arch="sm_90a").problem
        assert (problem.align_bytes, problem.ascending) == (align_bytes, ascending)


class Described:
    """A shape and a dtype, and nothing else."""

    shape, dtype = (1, 40, 2, 128), INPUT_DTYPES["bfloat16"]


def test_a_plan_for_no_array_is_for_one_that_lies_well():
    assert cufa.plan(*(Described(),) * 3, arch="sm_90a").problem.align_bytes == 16


@pytest.mark.parametrize(
    ("arch", "options", "reads"),
    [
        ("sm_90a", {}, True),
        ("sm_90a", {"causal": True}, True),
        ("sm_90a", {"alibi_slopes": np.ones(4, np.float32)}, False),
        ("sm_90a", {"kernel": "fwd_8_split_kv"}, False),
        ("sm_89", {}, False),
    ],
)
def test_values_stored_transposed_are_copied_where_no_kernel_reads_them(arch, options, reads):
    """Whatever the number of keys, only multiples of 4 of which can be read so."""
    for seqlen in range(64, 69):
        q = np.empty((2, seqlen, 4, 64), INPUT_DTYPES[FLOAT8])
        v = np.empty((2, 4, 64, 80), q.dtype)[..., :seqlen].transpose(0, 3, 1, 2)
        problem = cufa.plan(q, q, v, arch=arch, **options).problem
        assert problem.transposed_values == (reads and seqlen % 4 == 0)
