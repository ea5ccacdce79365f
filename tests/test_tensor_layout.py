"""What kernels are told of where tensors lie, beside what NumPy says."""

import itertools

import numpy as np
import pytest

from cufa.problem import LAYOUTS
from cufa.tensor_layout import is_contiguous, layout_of

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
