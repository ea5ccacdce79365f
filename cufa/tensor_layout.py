"""How tensors lie in memory, as kernels are told: an address and three strides each.

All but the addresses follows from shapes and strides, so layouts are cached, not computed in every call.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cufa.problem import DTYPES, FLOAT8, KEYS_TOGETHER, MAX_ALIGN_BYTES, Axes, Problem, Shape

# In general it is NP-hard to tell whether two arrays share memory. The search gives up with more distances
# left than this. Between slices of one array, there are at most twice as many after each axis, mostly one.
_MOST_DISTANCES = 4096
# Element size of a bias that the copy engine can bring in the layout of wgmma's operands.
HALF_BYTES = 2
# The shape of a tensor, and its strides in bytes; None for a contiguous tensor.
Storage = tuple[Shape, Shape | None]
# Strides of one length, in bytes: it, and the least and the most of them that lie between elements of two
# arrays; those in the other direction are negative.
Step = tuple[int, int, int]
# Pairs of an output and an input that it may be, each by its name.
InPlace = frozenset[tuple[str, str]]


@dataclass(frozen=True, eq=False)
class Layout:
    """The layout of some tensors; `layout_of` returns the same one for tensors that lie alike.

    `places` are four numbers per tensor, as in the parameter structs: 0 for the address, then batch, row and
    head stride in elements, 0 along an axis of length 1. `align_bytes` divides all strides in bytes.
    `ascending` says that no stride is negative. `scattered` are the indices of the tensors whose last axis is
    not contiguous: they must be copied, and `places` has the strides of the copy.
    """

    places: tuple[int, ...]
    align_bytes: int
    ascending: bool
    scattered: tuple[int, ...]

    def alignment(self, addresses: Iterable[int]) -> int:
        """The largest power of two up to `MAX_ALIGN_BYTES` that divides strides and addresses."""
        bits = self.align_bytes
        for address in addresses:
            bits |= address
        return bits & -bits

    def fields(self, addresses: Sequence[int]) -> list[int]:
        """The four numbers of each tensor, with these addresses."""
        fields = list(self.places)
        fields[::4] = addresses
        return fields


@functools.lru_cache(maxsize=4096)
def with_queries_as_heads(layout: Layout) -> Layout:
    """The layout of q, k, v and out with query heads as queries, and queries as heads."""
    places = list(layout.places)
    for first in (0, 12):  # of q, and of out
        row_stride, head_stride = places[first + 2 : first + 4]
        places[first + 2 : first + 4] = head_stride, row_stride
    return replace(layout, places=tuple(places))


@functools.lru_cache(maxsize=4096)
def layout_of(
    tensors: tuple[Storage, ...], itemsize: int | tuple[int, ...], axes: Axes | tuple[Axes, ...]
) -> Layout:
    """The layout of tensors whose elements have `itemsize` bytes.

    `itemsize` and `axes` (batch, seqlen and heads) are the same for all tensors, or one per tensor.
    """
    itemsizes = itemsize if isinstance(itemsize, tuple) else (itemsize,) * len(tensors)
    axes_of = axes if isinstance(axes[-1], tuple) else (axes,) * len(tensors)
    scattered = tuple(
        number
        for number, (shape, strides) in enumerate(tensors)
        if strides is not None and shape[-1] > 1 and strides[-1] != itemsizes[number]
    )
    places: list[int] = []
    in_bytes: list[int] = []
    for number, (shape, strides) in enumerate(tensors):
        if strides is None or number in scattered:
            strides = contiguous_strides(shape, itemsizes[number])
        walked = [0 if axis is None or shape[axis] < 2 else strides[axis] for axis in axes_of[number]]
        places += (0, *(stride // itemsizes[number] for stride in walked))
        in_bytes += walked
    align_bytes = alignment(functools.reduce(operator.or_, in_bytes))
    return Layout(tuple(places), align_bytes, min(in_bytes) >= 0, scattered)


def alignment(bits: int) -> int:
    """The largest power of two up to `MAX_ALIGN_BYTES` that divides all numbers or-ed into `bits`."""
    bits |= MAX_ALIGN_BYTES
    return bits & -bits


def lies_transposed(problem: Problem, values: Storage, axes: Axes) -> bool:
    """Whether V is stored transposed, its keys adjacent, such that `fwd_7_fp8` reads it without a copy.

    Only it does, and it needs rows of Q, K and O of a multiple of 16 bytes.
    """
    shape, strides = values
    features = problem.features
    if problem.dtype != FLOAT8 or features.packed or features.page_size or strides is None:
        return False
    if problem.head_dim * problem.itemsize % MAX_ALIGN_BYTES:
        return False
    if problem.value_dim * problem.output.itemsize % MAX_ALIGN_BYTES:
        return False
    keys_axis = axes[1]
    if strides[keys_axis] != problem.itemsize or shape[keys_axis] % KEYS_TOGETHER:
        return False
    others = [strides[axis] for axis, size in enumerate(shape) if size > 1 and axis != keys_axis]
    return all(stride > 0 and stride % MAX_ALIGN_BYTES == 0 for stride in others)


def lie_in_keys(keys: Region, values: Region) -> bool:
    """Whether rows of V are the beginnings of those of K, as in a cache of multi-head latent attention."""
    same = keys.address == values.address and keys.strides == values.strides
    return same and values.shape[-1] <= keys.shape[-1]


def transposed(storage: Storage, axes: Axes) -> Storage:
    """The same memory with the axes of rows and columns swapped."""
    row_axis = axes[1]

    def swapped(values: Shape) -> Shape:
        places = list(values)
        places[row_axis], places[-1] = places[-1], places[row_axis]
        return tuple(places)

    shape, strides = storage
    return swapped(shape), strides and swapped(strides)


def is_contiguous(shape: Shape, strides: Shape, itemsize: int) -> bool:
    """Whether elements follow each other without gaps, the last axis fastest."""
    if 0 in shape:
        return True
    packed = contiguous_strides(shape, itemsize)
    return all(size == 1 or stride == step for size, stride, step in zip(shape, strides, packed, strict=True))


class Region(NamedTuple):
    """The memory of an array; `address` is that of its first element, strides are in bytes."""

    address: int
    shape: Shape
    strides: Shape
    itemsize: int

    @property
    def span(self) -> tuple[int, int]:
        """The addresses of the first byte and past the last; an empty range for an empty array."""
        first, end = _extent(self.shape, self.strides, self.itemsize)
        return self.address + first, self.address + end

    @property
    def overlaps_itself(self) -> bool:
        """Whether two elements may share an address, as in a broadcast view."""
        return _overlaps_itself(self.shape, self.strides, self.itemsize)

    def overlaps(self, other: Region) -> bool:
        """Whether elements of the two share memory, even if they are interleaved.

        Also True if they lie among each other in strides so irregular that this would take long to tell.
        """
        if 0 in self.shape or 0 in other.shape:
            return False
        (first, end), (other_first, other_end) = self.span, other.span
        if end <= other_first or other_end <= first:
            return False
        return _add_up(_steps_between(self, other), other.address - self.address)


@functools.lru_cache(maxsize=4096)
def _extent(shape: Shape, strides: Shape, itemsize: int) -> tuple[int, int]:
    """A span, from the address of the first element."""
    if 0 in shape:
        return 0, 0
    reaches = [stride * (size - 1) for stride, size in zip(strides, shape, strict=True)]
    return sum(min(reach, 0) for reach in reaches), sum(max(reach, 0) for reach in reaches) + itemsize


@functools.lru_cache(maxsize=4096)
def _overlaps_itself(shape: Shape, strides: Shape, itemsize: int) -> bool:
    if 0 in shape:
        return False
    reached = itemsize
    for stride, size in sorted(
        (abs(stride), size) for stride, size in zip(strides, shape, strict=True) if size > 1
    ):
        if stride < reached:
            return True
        reached += stride * (size - 1)
    return False


def _steps_between(a: Region, b: Region) -> list[Step]:
    """The distances from bytes of `b` to bytes of `a`, beside that of their addresses: sums of these steps.

    From the shortest step on. One that only continues the multiples of the one before is made part of it, as
    the step from row to row in contiguous arrays.
    """
    along_axes = []
    for region, sign in ((a, 1), (b, -1)):
        for stride, size in zip(region.strides, region.shape, strict=True):
            if size > 1:
                ends = 0, (size - 1) * (sign if stride > 0 else -sign)
                along_axes.append((abs(stride), min(ends), max(ends)))
    steps = [(1, 1 - b.itemsize, a.itemsize - 1)]
    for length, least, most in sorted(along_axes):
        last_length, last_least, last_most = steps[-1]
        times, rest = divmod(length, last_length)
        if rest == 0 and times <= last_most - last_least + 1:
            steps[-1] = (last_length, last_least + times * least, last_most + times * most)
        else:
            steps.append((length, least, most))
    return steps


def _add_up(steps: Sequence[Step], distance: int) -> bool:
    """Whether steps add up to the distance, or there are too many sums to tell."""
    # How far the steps before each one, which are shorter, reach together.
    backs = itertools.accumulate((length * least for length, least, _ in steps), initial=0)
    aheads = itertools.accumulate((length * most for length, _, most in steps), initial=0)
    with_reach = list(zip(steps, backs, aheads, strict=False))
    distances = {distance}
    for (length, least, most), back, ahead in reversed(with_reach):
        left: set[int] = set()
        for wanted in distances:
            # So many that the shorter steps can do the rest.
            first, last = max(least, -((ahead - wanted) // length)), min(most, (wanted - back) // length)
            if len(left) + last - first >= _MOST_DISTANCES:
                return True
            left.update(wanted - length * times for times in range(first, last + 1))
        distances = left
    return bool(distances)


def check_apart(
    regions: Mapping[str, Region],
    outputs: Collection[str],
    in_place: InPlace = frozenset(),
) -> None:
    """Raise ValueError if outputs share memory with themselves or with other arrays, all given by name."""
    spans = {name: region.span for name, region in regions.items()}
    checked = [name for name in regions if name not in outputs]
    for name in outputs:
        output = regions[name]
        if output.overlaps_itself:
            raise ValueError(
                f"{name} has strides {output.strides} for shape {output.shape}, so that elements share "
                "memory; each must have its own"
            )
        first, end = spans[name]
        for other in checked:
            if (name, other) in in_place and output == regions[other]:
                continue
            other_first, other_end = spans[other]
            if first < other_end and other_first < end and output.overlaps(regions[other]):
                raise ValueError(f"{name} overlaps {other} in memory; it must not")
        checked.append(name)


def check_aligned(regions: Mapping[str, Region]) -> None:
    """Raise ValueError, naming the array, if an element's address is not a multiple of its size."""
    for name, (address, shape, strides, itemsize) in regions.items():
        bits = address
        for size, stride in zip(shape, strides, strict=True):
            if size > 1:
                bits |= stride
        if bits % itemsize:
            raise ValueError(
                f"{name} has an address or a stride that is a multiple of {alignment(bits)} bytes only; "
                f"{itemsize}-byte elements need {itemsize}"
            )


def lies_in_boxes(bias: Region) -> bool:
    """Whether the copy engine can bring boxes of a bias, which must have 16-bit elements.

    Along a broadcast axis it brings the only element. Several rows must not share one address.
    """
    address, shape, strides, itemsize = bias
    if itemsize != HALF_BYTES or 0 in shape or shape[-1] < 2 or strides[-1] != itemsize:
        return False
    steps = [stride for size, stride in zip(shape[:-1], strides[:-1], strict=True) if size > 1]
    rows_in_one_place = len(shape) > 1 and shape[-2] > 1 and strides[-2] == 0
    aligned = all(step % MAX_ALIGN_BYTES == 0 for step in (address, *steps))
    return aligned and not rows_in_one_place and min(steps, default=0) >= 0


def contiguous_bias_lies_in_boxes(problem: Problem) -> bool:
    """The same for a problem's bias that is contiguous and as aligned as its rows allow."""
    shape, name = problem.features.bias, problem.features.bias_dtype
    if shape is None or name is None:
        return False
    itemsize = DTYPES[name].itemsize
    return lies_in_boxes(Region(0, shape, contiguous_strides(shape, itemsize), itemsize))


def contiguous_strides(shape: Shape, itemsize: int) -> Shape:
    """The strides of a contiguous array."""
    *strides, _ = itertools.accumulate(reversed(shape), operator.mul, initial=itemsize)
    return tuple(reversed(strides))
