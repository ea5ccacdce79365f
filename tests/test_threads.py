"""Threads of the CPU path end their work early, and by themselves, once a call has failed."""

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cufa
from cufa import cpu
from cufa.cpu import stacks, tiles
from cufa.cpu.arithmetic import Scratch
from cufa.score_rules import Sequence
from cufa.threads import in_threads, until_stopped

# What nobody ends takes seconds, in steps of milliseconds.
STEPS, STEP_SECONDS = 2_000, 0.002


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """Python hears them even if whoever runs the tests, as a shell in the background, has them ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def two_threads_with_many_tiles() -> Iterator[None]:
    with (
        mock.patch.multiple(tiles, Q_TILE=8, KV_TILE=16),
        mock.patch.object(stacks, "MOST_SCORES", 0),
        mock.patch.multiple(cpu, PARALLEL_SCORES=0, SCORES_OF_THREAD=1, most_threads=lambda: 2),
    ):
        yield


def fail() -> None:
    raise LookupError("this share alone")


def interrupt() -> None:
    """As Ctrl-C does, of which only the main thread hears."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


ENDS = [
    pytest.param(fail, LookupError, id="error"),
    pytest.param(
        interrupt,
        KeyboardInterrupt,
        marks=pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's"),
        id="interrupt",
    ),
]


class Work:
    """Long shares: `done` has the number of each step's, and share 1 calls `end` amid the others."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.done: list[int] = []
        self._end = end

    def __call__(self, share: int) -> int:
        for step in until_stopped(range(STEPS)):
            time.sleep(STEP_SECONDS)
            self.done.append(share)
            if (share, step) == (1, 5):
                self._end()
        return share


@pytest.mark.parametrize(("end", "error"), ENDS)
def test_shares_end_with_an_error_of_a_later_one_or_an_interrupt(
    end: Callable[[], None], error: type[BaseException]
) -> None:
    work = Work(end)
    with pytest.raises(error) as raised:
        list(in_threads(work, iter(range(6)), threads=2))
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
    assert set(work.done) == {0, 1}  # no other begins
    assert len(work.done) < STEPS / 2
    assert list(in_threads(abs, iter(range(3)), threads=2)) == [0, 1, 2]


def test_no_share_begins_if_there_is_an_error_amid_their_making() -> None:
    def shares() -> Iterator[float]:
        yield from [STEP_SECONDS] * STEPS
        fail()

    done: list[None] = []
    with pytest.raises(LookupError):
        list(in_threads(lambda share: done.append(time.sleep(share)), shares(), threads=2))
    assert len(done) < STEPS / 2


def test_shares_end_with_their_iterator() -> None:
    work = Work(lambda: None)
    results = in_threads(lambda share: share and work(share), iter(range(6)), threads=2)
    assert next(results) == 0
    results.close()
    assert set(work.done) <= {1, 2}
    assert len(work.done) < STEPS / 2


@contextlib.contextmanager
def products(end: Callable[[], None]) -> Iterator["itertools.count[int]"]:
    """The number of the next product of the CPU path, of which the twentieth calls `end`."""
    numbers, genuine = itertools.count(), Scratch.product

    def product(*arguments: Any) -> Any:
        number = next(numbers)
        if number == 20:
            end()
        if number >= 20:
            time.sleep(STEP_SECONDS)
        return genuine(*arguments)

    with mock.patch.object(Scratch, "product", product):
        yield numbers


def compute(direction: str) -> None:
    """With at least `STEPS` products in tiles of 4 heads."""
    x = np.random.default_rng(0).standard_normal((1, 256, 4, 8), np.float32)
    if direction == "forward":
        cufa.attention(x, x, x, backend="numpy")
    else:
        cufa.attention_backward(x, x, x, x, x, np.zeros((1, 4, 256), np.float32), backend="numpy")


def assert_ended(numbers: "itertools.count[int]") -> None:
    """Early, and no thread goes on: at most for a moment, if its start was interrupted."""
    time.sleep(10 * STEP_SECONDS)
    done = next(numbers)
    assert done < STEPS / 2
    time.sleep(10 * STEP_SECONDS)
    assert next(numbers) == done + 1


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_calls_that_are_to_end_have_many_tiles(direction: str) -> None:
    with mock.patch.object(time, "sleep"), products(lambda: None) as numbers:
        compute(direction)
    assert next(numbers) >= STEPS


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("end", "error"), ENDS)
def test_a_call_ends_amid_its_tiles(
    direction: str, end: Callable[[], None], error: type[BaseException]
) -> None:
    with products(end) as numbers:
        with pytest.raises(error):
            compute(direction)
        assert_ended(numbers)


def test_a_backward_ends_if_the_sums_of_its_threads_cannot_be_written() -> None:
    """As by an interrupt in between, whose traceback keeps what the call was at."""
    with products(lambda: None) as numbers, mock.patch.object(tiles, "KV_TILE", 256):
        with (
            mock.patch.object(Sequence, "unused_keys", side_effect=LookupError),
            pytest.raises(LookupError) as raised,
        ):
            compute("backward")
        assert_ended(numbers)
    assert raised.tb
