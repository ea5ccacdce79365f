"""The Hopper kernels where time decides what runs beside what, and where tiles are many, few, empty or far.

Blocks of the forward take tile after tile, whichever is next when they ask. Its results must be the same bits
whatever the order, on streams and in graphs that run at the same time, and so must dK and dV. Sums of dQ are
added up in any order, so those may differ by a rounding.
"""

import dataclasses
import itertools
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import ml_dtypes  # noqa: F401 - makes numpy.dtype("bfloat16") known
import numpy as np
import pytest
from gpu_calls import skip_unless_it_runs_here
from test_emulator import planted
from test_gpu import on_gpu
from tolerance import Problem, assert_attention, assert_gradients, random_problem

import cufa
from cufa import checking, device, reference, rounding_errors
from cufa.plan.fwd_6_tiles import ALIKE_PACES

pytestmark = pytest.mark.gpu

FORWARD = "fwd_6_wgmma"
BACKWARD = ("bwd_4_wgmma", "bwd_5_wgmma_wide", "bwd_8_wgmma_pair")
NARROW, WIDE, PAIR = BACKWARD
HEAD_DIMS = (64, 128, 256)
REPEATS = 1000


@pytest.fixture(autouse=True)
def _needs_hopper(cupy):
    skip_unless_it_runs_here(FORWARD)


def backward_for(head_dim, *, biased=False):
    """The kernel for values of as many head dims as keys have."""
    return NARROW if head_dim <= 128 else WIDE if biased else PAIR


def bits(array):
    return array.view(f"u{array.itemsize}")


def poison(array):
    """Make all of it NaN."""
    raw = bits(array)
    raw.fill(np.iinfo(raw.dtype).max)


class Step:
    """A forward and a backward call that always write the same arrays; packed if there are `lengths`."""

    def __init__(
        self, cupy, batch, seqlen, heads, kv_heads, head_dim, *, lengths=None, seqlen_k=None, **options
    ):
        self.cupy, self.options = cupy, options
        self.backward_kernel = backward_for(head_dim)
        random = cupy.random.default_rng(head_dim)
        if lengths is not None:
            ends = cupy.asarray(np.cumsum([0, *lengths]).astype(np.int32))
            self.options = options | {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
            rows = keys = (sum(lengths),)
        else:
            rows, keys = (batch, seqlen), (batch, seqlen_k or seqlen)

        def normal(*shape):
            return random.standard_normal(shape, dtype=np.float32).astype(np.float16)

        self.q, self.dout = (normal(*rows, heads, head_dim) for _ in range(2))
        self.k, self.v = (normal(*keys, kv_heads, head_dim) for _ in range(2))
        lse_shape = (heads, *rows) if lengths is not None else (batch, heads, seqlen)
        self.out, self.lse = cupy.empty_like(self.q), cupy.empty(lse_shape, np.float32)
        self.dq, self.dk, self.dv = (cupy.empty_like(x) for x in (self.q, self.k, self.v))

    @property
    def exact(self):
        """The results of which every bit is the same in every run."""
        return self.out, self.lse, self.dk, self.dv

    @property
    def workspace_bytes(self):
        plan = cufa.plan(self.q, self.k, self.v, backward=True, kernel=self.backward_kernel, **self.options)
        return plan.workspace_bytes

    def forward(self):
        for result in (self.out, self.lse):
            poison(result)
        arguments = self.q, self.k, self.v
        cufa.attention(*arguments, out=self.out, lse=self.lse, kernel=FORWARD, **self.options)

    def backward(self, workspace=None, **options):
        gradients = {"dq": self.dq, "dk": self.dk, "dv": self.dv}
        for result in gradients.values():
            poison(result)
        cufa.attention_backward(
            *(self.dout, self.q, self.k, self.v, self.out, self.lse),
            **gradients,
            workspace=workspace,
            kernel=self.backward_kernel,
            **self.options,
            **options,
        )

    def remember(self):
        """Take what the results are now for what they must be."""
        self.expected = [bits(x).copy() for x in self.exact]
        self.expected_dq = self.dq.copy()
        self.wrong = self.cupy.zeros((), np.int64)

    def count_wrong(self):
        """Add to `wrong`, on the current stream, how many results are not what they were."""
        for now, first in zip(self.exact, self.expected, strict=True):
            self.wrong += self.cupy.count_nonzero(bits(now) != first)
        self.wrong += self.cupy.count_nonzero(~differ_by_a_rounding(self.dq, self.expected_dq))


def differ_by_a_rounding(a, b):
    """Sums in float32 of the same numbers, rounded to float16."""
    exact, largest = b.astype(np.float32), abs(b).max().astype(np.float32)
    return abs(a.astype(np.float32) - exact) <= 2.0**-10 * abs(exact) + 1e-5 * largest


PACKED = partial(Step, batch=1, seqlen=None, causal=True)
SAME_BITS = {
    "all keys": partial(Step, batch=4, seqlen=1000, heads=32, kv_heads=32, head_dim=64),
    "causal": partial(Step, batch=2, seqlen=1500, heads=32, kv_heads=8, head_dim=128, causal=True),
    "causal, wide": partial(Step, batch=2, seqlen=1500, heads=24, kv_heads=8, head_dim=256, causal=True),
    "more rows than keys": partial(
        Step, batch=3, seqlen=900, seqlen_k=200, heads=32, kv_heads=32, head_dim=128, causal=True
    ),
    "window": partial(Step, batch=2, seqlen=2000, heads=16, kv_heads=4, head_dim=128, window=(300, 20)),
    "near window": partial(Step, batch=8, seqlen=1000, heads=12, kv_heads=12, head_dim=64, window=(64, 64)),
    "keys in parts": partial(Step, batch=1, seqlen=5000, heads=5, kv_heads=5, head_dim=64),
    "keys in parts, causal": partial(
        Step, batch=1, seqlen=4000, heads=4, kv_heads=2, head_dim=128, causal=True
    ),
    "packed, keys in parts": partial(
        PACKED, heads=2, kv_heads=1, head_dim=128, lengths=[3000, 0, 2000], tiles={"key_parts": 3}
    ),
    "packed": partial(
        PACKED, heads=32, kv_heads=8, head_dim=64, lengths=[700, 0, 1, 129, 400, 0, 0, 1000, 64]
    ),
}


@pytest.mark.parametrize("case", SAME_BITS)
def test_the_forward_has_the_same_bits_a_thousand_times(cupy, case):
    step = SAME_BITS[case](cupy)
    step.forward()
    first = [bits(x).copy() for x in (step.out, step.lse)]
    wrong = cupy.zeros((), np.int64)
    for _ in range(REPEATS):
        step.forward()
        for now, expected in zip((step.out, step.lse), first, strict=True):
            wrong += cupy.count_nonzero(bits(now) != expected)
    assert wrong == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_keys_in_parts(cupy, head_dim, causal):
    """Of all tiles or of those of the last round, with rows that see no key and keys that end in a tile."""
    for lengths, parts in itertools.product(((3000, 2900), (700, 4500)), (2, 3, 11)):
        rng = np.random.default_rng(head_dim + parts)
        shape = {"seqlen_q": lengths[0], "seqlen_k": lengths[1], "heads": 4, "kv_heads": 2}
        problem = random_problem(rng, "bfloat16", batch=1, head_dim=head_dim, **shape)
        q, k, v, _ = on_gpu(problem)
        sink = rng.standard_normal(4).astype(np.float32)
        options = {"causal": causal, "softcap": 20.0}
        rung = {"kernel": FORWARD, "tiles": {"key_parts": parts}}
        out, lse = cufa.attention(q, k, v, return_lse=True, sink=cupy.asarray(sink), **options, **rung)
        assert_attention(out.get(), lse.get(), problem, sink=sink, **options)


def some_steps(cupy):
    """Of every kernel; grids that fill the GPU and such that leave room for others."""
    return [
        Step(cupy, 2, 700, 16, 8, 64, causal=True),
        Step(cupy, 1, 300, 8, 8, 128),
        Step(cupy, 1, 500, 4, 2, 256, causal=True),
        Step(cupy, 4, 900, 16, 4, 128, causal=True),
        Step(cupy, 1, 4000, 4, 2, 128, causal=True),  # keys in parts
        Step(cupy, 1, 130, 4, 4, 64),
    ]


def remembered_steps(cupy):
    steps = some_steps(cupy)
    for step in steps:
        step.forward()
        step.backward()
        step.remember()
    cupy.cuda.Device().synchronize()
    return steps


def test_a_workspace_serves_calls_of_every_kind_in_turn(cupy):
    steps = remembered_steps(cupy)
    workspace = cupy.empty(max(step.workspace_bytes for step in steps), np.uint8)
    for _ in range(20):
        for step in steps:
            step.forward()
            poison(workspace)
            step.backward(workspace)
            step.count_wrong()
    assert sum(int(step.wrong) for step in steps) == 0


def hold_back(cupy, streams):
    """Let these streams wait for one long kernel, so that what they are given meanwhile begins at once."""
    busy = cupy.ones((8192, 8192), np.float32)
    busy @ busy
    begin = cupy.cuda.get_current_stream().record()
    for stream in streams:
        stream.wait_event(begin)


def test_streams_side_by_side(cupy):
    steps = remembered_steps(cupy)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in steps]
    for _ in range(20):
        hold_back(cupy, streams)
        for _, (step, stream) in itertools.product(range(5), zip(steps, streams, strict=True)):
            with stream:
                step.forward()
                step.backward()
                step.count_wrong()
        cupy.cuda.Device().synchronize()
    assert sum(int(step.wrong) for step in steps) == 0


def test_graphs_side_by_side_and_beside_calls(cupy):
    """Each replay runs on another stream than the one before; no two of one graph run at once."""
    *captured, called = remembered_steps(cupy)
    workspaces = [cupy.empty(step.workspace_bytes, np.uint8) for step in captured]
    graphs = []
    for step, workspace in zip(captured, workspaces, strict=True):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            step.forward()
            step.backward(workspace)
            graphs.append(stream.end_capture())
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in graphs]
    alone = cupy.cuda.Stream(non_blocking=True)
    for _ in range(10):
        hold_back(cupy, (*streams, alone))
        for round_ in range(10):
            for i, graph in enumerate(graphs):
                graph.launch(streams[(i + round_) % len(streams)])
            with alone:
                called.forward()
                called.backward()
                called.count_wrong()
        cupy.cuda.Device().synchronize()
        for step in captured:
            step.count_wrong()
    cupy.cuda.Device().synchronize()
    assert sum(int(step.wrong) for step in (*captured, called)) == 0


# Keeps SMs busy until it is told to stop, or for ten seconds. A block has so much shared memory that no other
# of its kind, and none that works on keys, fits beside it.
HOLD = r"""
extern "C" __global__ void hold(const volatile int* stop) {
    long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (!*stop && now - begin < 10000000000ll);
}
"""
HELD_BYTES = 200 << 10
FREE_SMS = 3


@pytest.mark.parametrize("deterministic", [False, True])
def test_few_blocks_at_a_time(cupy, deterministic):
    """Blocks wait for others that add to the same sums; never for one that has not begun."""
    steps = [
        Step(cupy, 1, 1000, 32, 32, head_dim, causal=causal)
        for head_dim, causal in itertools.product(HEAD_DIMS, (False, True))
    ]
    for step in steps:
        step.forward()
        step.backward(deterministic=deterministic)
        step.remember()
        step.count_wrong()  # a kernel's first call may have to wait for all others
    hold = cupy.RawKernel(HOLD, "hold")
    hold.max_dynamic_shared_size_bytes = HELD_BYTES
    stop = np.frombuffer(cupy.cuda.alloc_pinned_memory(4), np.int32, 1)
    stop[0] = 0
    cupy.cuda.Device().synchronize()
    held, free = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with held:
        blocks = device.current().sm_count - FREE_SMS
        hold((blocks,), (32,), (stop.ctypes.data,), shared_mem=HELD_BYTES)
    with free:
        for step in steps:
            step.backward(deterministic=deterministic)
            step.count_wrong()
        free.synchronize()
    still_held = not held.done
    stop[0] = 1
    held.synchronize()
    assert still_held
    assert sum(int(step.wrong) for step in steps) == 0


# ---- query heads that share keys, in parts ----


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "parts"), [(64, 4), (128, 8), (256, 2)])
def test_heads_in_parts(cupy, head_dim, parts, causal):
    """Whatever the parts are, the gradients are right; of a deterministic call they are the same bits."""
    problem = random_problem(
        np.random.default_rng(parts),
        "bfloat16",
        seqlen_q=300,
        seqlen_k=450,
        heads=8,
        kv_heads=1,
        head_dim=head_dim,
    )
    q, k, v, dout = on_gpu(problem)
    out, lse = cufa.attention(q, k, v, causal=causal, return_lse=True)
    backward = partial(
        cufa.attention_backward, dout, q, k, v, out, lse, causal=causal, kernel=backward_for(head_dim)
    )
    chosen = cufa.plan(q, k, v, causal=causal, backward=True, kernel=backward_for(head_dim))
    assert chosen.tiles["head_parts"] > 1
    for tiles in (None, {"head_parts": parts}, {"head_parts": parts, "row_parts": 2}, {"row_parts": 3}):
        gradients = backward(tiles=tiles)
        assert_gradients(tuple(x.get() for x in gradients), problem, causal=causal)
        first, second = (backward(tiles=tiles, deterministic=True) for _ in range(2))
        for once, again in zip(first, second, strict=True):
            assert (bits(once) == bits(again)).all()


# ---- numbers of tiles ----

# Rows, and tiles of keys: rings of stages are passed not even once, once and often.
ROWS_AND_KEY_TILES = [(130, 1), (130, 2), (300, 3), (300, 9), (8200, 3), (900, 1)]


def copies_to_fill(problem, block_m):
    """How many sequences like this fill each SM several times, and the L2 cache with sums of dQ."""
    tiles = -(-problem.q.shape[1] // block_m) * problem.q.shape[2]
    sums_bytes = problem.q.size * np.dtype(np.float32).itemsize
    return max(-(-4 * device.current().sm_count // tiles), -(-device.current().l2_bytes // sums_bytes))


def repeated(cupy, array, count):
    return cupy.ascontiguousarray(cupy.broadcast_to(cupy.asarray(array), (count, *array.shape[1:])))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "key_tiles"), ROWS_AND_KEY_TILES)
@pytest.mark.parametrize(("head_dim", "tiles"), [*((dim, {}) for dim in HEAD_DIMS), (128, {"block_m": 80})])
def test_numbers_of_tiles(cupy, head_dim, tiles, rows, key_tiles, causal):
    """All sequences of a batch are the same, so must their results be; the first is held to the truth.

    Under the causal mask the first of 900 rows, many tiles, see no key.
    """
    rng = np.random.default_rng(rows + key_tiles)
    shape = {"seqlen_q": rows, "heads": 2, "kv_heads": 1, "head_dim": head_dim}
    kernels = {False: FORWARD, True: backward_for(head_dim)}

    def plan(seqlen_k, backward):
        query, key = np.empty((1, rows, 2, head_dim), "f2"), np.empty((1, seqlen_k, 1, head_dim), "f2")
        return cufa.plan(query, key, key, causal=causal, backward=backward, kernel=kernels[backward])

    for backward in (False, True):
        usual = plan(1000, backward).tiles
        problem = random_problem(rng, "float16", seqlen_k=key_tiles * usual["block_n"] - 3, **shape)
        count = copies_to_fill(problem, usual["block_m"])
        inputs = (problem.q, problem.k, problem.v, problem.dout)
        q, k, v, dout = (repeated(cupy, x, count) for x in inputs)
        out, lse = cufa.attention(q, k, v, causal=causal, return_lse=True, kernel=FORWARD)
        if not backward:
            assert (bits(out) == bits(out)[:1]).all()
            assert (bits(lse) == bits(lse)[:1]).all()
            assert_attention(out[:1].get(), lse[:1].get(), problem, causal=causal)
            continue
        arguments = dout, q, k, v, out, lse
        dq, dk, dv = cufa.attention_backward(*arguments, causal=causal, kernel=kernels[True], tiles=tiles)
        assert (bits(dk) == bits(dk)[:1]).all()
        assert (bits(dv) == bits(dv)[:1]).all()
        assert differ_by_a_rounding(dq, dq[:1]).all()
        assert_gradients(tuple(x[:1].get() for x in (dq, dk, dv)), problem, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(600, 1000), (1000, 600)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_slopes_of_alibi(cupy, head_dim, lengths, causal):
    """From those that change little to those by which a key weighs half of the next, and of either sign."""
    slopes = np.array([1e-4, 0.01, 0.7, 1, 0, -1e-3, -0.05, -0.7], np.float32)
    rng = np.random.default_rng(head_dim)
    seqlen_q, seqlen_k = lengths
    shape = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads": len(slopes), "kv_heads": 4}
    problem = random_problem(rng, "bfloat16", batch=1, head_dim=head_dim, **shape)
    q, k, v, dout = on_gpu(problem)
    options = {"causal": causal, "alibi_slopes": cupy.asarray(slopes)}
    out, lse = cufa.attention(q, k, v, return_lse=True, kernel=FORWARD, **options)
    gradients = cufa.attention_backward(dout, q, k, v, out, lse, kernel=backward_for(head_dim), **options)
    rules = {"causal": causal, "alibi_slopes": slopes}
    assert_attention(out.get(), lse.get(), problem, **rules)
    assert_gradients(tuple(x.get() for x in gradients), problem, **rules)


# How a bias for 4 heads of 2 sequences lies: some as the copy engine can bring it, others not.
BIASES = {
    "contiguous": lambda draw, rows, keys: draw(2, 4, rows, keys),
    "of all sequences": lambda draw, rows, keys: draw(4, rows, keys),
    "of all heads": lambda draw, rows, keys: draw(2, 1, rows, keys),
    "of all queries": lambda draw, rows, keys: draw(2, 1, 1, keys),
    "of a larger array": lambda draw, rows, keys: draw(3, 8, rows + 9, keys + 16)[1:, ::2, 4:-5, 8:-8],
    "heads broadcast": lambda draw, rows, keys: np.broadcast_to(draw(2, 1, rows, keys), (2, 4, rows, keys)),
    "rows broadcast": lambda draw, rows, keys: np.broadcast_to(draw(2, 4, 1, keys), (2, 4, rows, keys)),
    "at an odd address": lambda draw, rows, keys: draw(2, 4, rows, keys + 8)[..., 1:-7],
    "rows backwards": lambda draw, rows, keys: draw(2, 4, rows, keys)[:, :, ::-1],
    "keys backwards": lambda draw, rows, keys: draw(2, 4, rows, keys)[..., ::-1],
}


@pytest.mark.parametrize("keys", [1000, 997])
@pytest.mark.parametrize("lies", BIASES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_biases_as_they_lie(cupy, head_dim, lies, keys):
    rng = np.random.default_rng(head_dim + keys)
    shape = {"seqlen_q": 700, "seqlen_k": keys, "heads": 4, "kv_heads": 2}
    problem = random_problem(rng, "bfloat16", batch=2, head_dim=head_dim, **shape)
    bias = BIASES[lies](lambda *sizes: np.asarray(rng.standard_normal(sizes)).astype("bfloat16"), 700, keys)
    # The same strides on the GPU: a view of a copy of all that the array is a view of.
    base = bias
    while base.base is not None:
        base = base.base
    offset = bias.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    memory = cupy.asarray(base.view(np.uint16)).data + offset
    there = cupy.ndarray(bias.shape, bias.dtype, memory, bias.strides)
    q, k, v, dout = on_gpu(problem)
    out, lse = cufa.attention(q, k, v, return_lse=True, kernel=FORWARD, bias=there)
    kernel = backward_for(head_dim, biased=True)
    gradients = cufa.attention_backward(dout, q, k, v, out, lse, kernel=kernel, bias=there)
    assert_attention(out.get(), lse.get(), problem, bias=bias)
    assert_gradients(tuple(x.get() for x in gradients), problem, bias=bias)


@pytest.mark.parametrize("shape", [(8, 16, 512), (2, 16, 2048)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_bias_has_the_same_bits_in_every_call(cupy, head_dim, shape):
    """Of all sequences, so that the L2 cache has it at once, and for blocks that stay for many tiles.

    The first head of each sequence is right, from the very first call.
    """
    batch, heads, seqlen = shape
    rng = np.random.default_rng(head_dim + seqlen)
    sizes = {"seqlen_q": seqlen, "seqlen_k": seqlen, "heads": heads, "kv_heads": heads}
    problem = random_problem(rng, "bfloat16", batch=batch, head_dim=head_dim, **sizes)
    q, k, v, dout = on_gpu(problem)
    bias = rng.standard_normal((heads, seqlen, seqlen)).astype("bfloat16")
    there = cupy.asarray(bias)

    def step():
        out, lse = cufa.attention(q, k, v, return_lse=True, kernel=FORWARD, bias=there)
        kernel = backward_for(head_dim, biased=True)
        return out, lse, *cufa.attention_backward(dout, q, k, v, out, lse, kernel=kernel, bias=there)

    first = step()
    wrong = cupy.zeros((), np.int64)
    for _ in range(50):
        out, lse, _, dk, dv = step()  # additions to dQ come in any order
        for now, expected in zip((out, lse, dk, dv), (*first[:2], *first[3:]), strict=True):
            wrong += cupy.count_nonzero(bits(now) != bits(expected))
    assert wrong == 0
    of_head = Problem(*(x[:, :, :1] for x in (problem.q, problem.k, problem.v, problem.dout)))
    out, lse, *gradients = (x.get() for x in first)
    assert_attention(out[:, :, :1], lse[:, :1], of_head, bias=bias[:1])
    assert_gradients(tuple(x[:, :, :1] for x in gradients), of_head, bias=bias[:1])


# The window of all but the last 130 of 900 rows ends before the first key; and so many heads that a block of
# the backward takes all keys of one, whose first tiles no query sees.
SEEING_NOTHING = [
    ((30, 30), {"seqlen_q": 900, "seqlen_k": 100, "batch": 2, "heads": 40, "kv_heads": 8}),
    ((100, 0), {"seqlen_q": 100, "seqlen_k": 900, "batch": 16, "heads": 8, "kv_heads": 8}),
]


@pytest.mark.parametrize(("window", "sizes"), SEEING_NOTHING, ids=["rows", "keys"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_windows_that_see_nothing(cupy, head_dim, window, sizes):
    rng = np.random.default_rng(head_dim)
    problem = random_problem(rng, "bfloat16", head_dim=head_dim, **sizes)
    q, k, v, dout = on_gpu(problem)
    out, lse = cufa.attention(q, k, v, window=window, return_lse=True, kernel=FORWARD)
    assert_attention(out.get(), lse.get(), problem, window=window)
    gradients = cufa.attention_backward(dout, q, k, v, out, lse, window=window)
    assert_gradients(tuple(x.get() for x in gradients), problem, window=window)


# Sequences, KV heads and keys: a block of the backward takes all keys of a head, or blocks take turns to add
# to dQ, in the order of their keys or in any.
PADDED = [(33, 4, 500), (8, 2, 1100), (3, 2, 5000)]


@pytest.mark.parametrize(
    "rules", [{}, {"causal": True}, {"window": (400, 100)}, {"deterministic": True}], ids=str
)
@pytest.mark.parametrize(("batch", "kv_heads", "keys"), PADDED)
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 192])
def test_padded_keys(cupy, head_dim, batch, kv_heads, keys, rules):
    """In front or behind, in a sequence all, and with gaps; the same bits again."""
    rng = np.random.default_rng(head_dim)
    sizes = {"batch": batch, "heads": 4, "kv_heads": kv_heads, "seqlen_q": 450, "seqlen_k": keys}
    problem = random_problem(rng, "bfloat16", head_dim=head_dim, **sizes)
    begins, ends = np.sort(rng.integers(0, keys, (2, batch, 1, 1, 1)), axis=0)
    places = np.arange(keys)
    shown = (places >= begins) & (places < ends)
    shown[0] = False
    shown[1] &= rng.random(keys) < 0.7
    visible = {name: value for name, value in rules.items() if name != "deterministic"} | {"mask": shown}
    q, k, v, dout = on_gpu(problem)
    out, lse = cufa.attention(q, k, v, return_lse=True, **visible | {"mask": cupy.asarray(shown)})
    assert_attention(out.get(), lse.get(), problem, **visible)
    options = rules | {"mask": cupy.asarray(shown)}
    gradients = cufa.attention_backward(dout, q, k, v, out, lse, **options)
    assert_gradients(tuple(x.get() for x in gradients), problem, **visible)
    if "deterministic" in rules:
        again = cufa.attention_backward(dout, q, k, v, out, lse, **options)
        assert all((bits(x) == bits(y)).all() for x, y in zip(gradients, again, strict=True))


@pytest.mark.parametrize(
    ("head_dim", "tiles"), [(dim, tiles) for dim, paces in ALIKE_PACES.items() for tiles in paces], ids=str
)
def test_padded_keys_in_tiles_of_all_sizes(cupy, head_dim, tiles):
    """As many keys for each of 40 sequences, more tiles than blocks, and some without keys."""
    rng = np.random.default_rng(head_dim)
    sizes = {"batch": 40, "heads": 6, "kv_heads": 2, "seqlen_q": 300, "seqlen_k": 700}
    problem = random_problem(rng, "bfloat16", head_dim=head_dim, **sizes)
    shown = np.arange(700) < rng.integers(0, 701, (40, 1, 1, 1))
    shown[0] = False
    shown[1] &= rng.random(700) < 0.7
    q, k, v, _ = on_gpu(problem)
    options = {"kernel": FORWARD, "tiles": dataclasses.asdict(tiles), "mask": cupy.asarray(shown)}
    out, lse = cufa.attention(q, k, v, return_lse=True, **options)
    assert_attention(out.get(), lse.get(), problem, mask=shown)


# Of the warpgroups of the backward, one passes over tiles of queries that see keys of the other one alone.
@pytest.mark.parametrize("window", [(0, 0), (64, 64), (127, 20)], ids=str)
@pytest.mark.parametrize(("head_dim", "kv_heads"), [(40, 4), (64, 2), (128, 4)])
@pytest.mark.parametrize("lengths", [(1000, 1000), (900, 1330), (1330, 900)], ids=str)
def test_near_windows(cupy, lengths, head_dim, kv_heads, window):
    rng = np.random.default_rng(head_dim)
    heads = {"batch": 3, "heads": 4, "kv_heads": kv_heads}
    problem = random_problem(
        rng, "bfloat16", head_dim=head_dim, seqlen_q=lengths[0], seqlen_k=lengths[1], **heads
    )
    q, k, v, dout = on_gpu(problem)
    out, lse = cufa.attention(q, k, v, window=window, return_lse=True)
    gradients = cufa.attention_backward(dout, q, k, v, out, lse, window=window)
    assert_gradients(tuple(x.get() for x in gradients), problem, window=window)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(136, 136), (200, 248), (64, 184), (152, 128)])
def test_heads_that_begin_in_the_middle_of_a_sector(cupy, head_dim, value_dim, kv_heads):
    """Of one KV head every other row does, of more every other head."""
    shape = {"seqlen_q": 300, "seqlen_k": 413, "heads": 4, "kv_heads": kv_heads}
    rng = np.random.default_rng(head_dim)
    problem = random_problem(rng, "bfloat16", batch=2, head_dim=head_dim, head_dim_v=value_dim, **shape)
    q, k, v, _ = on_gpu(problem)
    out, lse = cufa.attention(q, k, v, causal=True, return_lse=True, kernel=FORWARD)
    assert_attention(out.get(), lse.get(), problem, causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_sequences_of_length_0(cupy, head_dim, causal):
    rng = np.random.default_rng(head_dim)
    lengths = {"q": [0, 300, 0, 0, 1, 129, 0, 700, 7, 0], "k": [5, 300, 0, 70, 0, 64, 0, 500, 0, 3]}
    ends = {name: np.cumsum([0, *each]).astype(np.int32) for name, each in lengths.items()}
    problem = random_problem(
        rng,
        "bfloat16",
        seqlen_q=int(ends["q"][-1]),
        seqlen_k=int(ends["k"][-1]),
        heads=36,
        kv_heads=12,
        head_dim=head_dim,
    )
    problem = Problem(*(x[0] for x in (problem.q, problem.k, problem.v, problem.dout)))
    q, k, v, dout = on_gpu(problem)
    options = {"causal": causal, "cu_seqlens_q": ends["q"], "cu_seqlens_k": ends["k"]}
    on_device = options | {name: cupy.asarray(x) for name, x in options.items() if name != "causal"}
    out, lse = cufa.attention(q, k, v, return_lse=True, kernel=FORWARD, **on_device)
    assert_attention(out.get(), lse.get(), problem, **options)
    gradients = cufa.attention_backward(dout, q, k, v, out, lse, **on_device)
    assert_gradients(tuple(x.get() for x in gradients), problem, **options)


# ---- far apart ----

LONG = 131_072
# Under the causal mask the gradients of the last rows depend on no others, and neither do those of the last
# keys.
LAST = slice(-64, None)
# What other rows have is compared from here on: those before see few keys, and what is left of their dP - D
# is rounding.
FAR = slice(4096, None)
BFLOAT16 = np.dtype("bfloat16")


def to_bfloat16(x):
    return (bits(x) >> 16).astype(np.uint16).view(BFLOAT16)


def from_bfloat16(x):
    return (bits(x).astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("kernel", ["bwd_3_mma", *BACKWARD])
def test_131072_rows_that_lie_2_to_the_31_elements_apart(cupy, kernel):
    """Forward and backward on heads of one wide array, in which NaN lies between them.

    The last rows are held to the truth, the others to what other kernels make of compact copies.
    """
    dim, heads = (256 if kernel in BACKWARD[1:] else 128), 2
    forward = "fwd_5_mma" if kernel == "bwd_3_mma" else FORWARD
    slots = 2**31 // (LONG * heads * dim) + 1
    wide = cupy.empty((1, LONG, slots, heads, dim), BFLOAT16)
    assert wide.size > 2**31
    poison(wide)
    *unused, q, k, v, dout, out, dq, dk, dv = (wide[:, :, slot] for slot in range(slots))
    random = cupy.random.default_rng(dim)
    for x in (q, k, v, dout):
        bits(x)[...] = bits(to_bfloat16(random.standard_normal(x.shape, dtype=np.float32)))
    _, lse = cufa.attention(q, k, v, causal=True, return_lse=True, out=out, kernel=forward)
    cufa.attention_backward(dout, q, k, v, out, lse, causal=True, dq=dq, dk=dk, dv=dv, kernel=kernel)
    assert all((bits(x) == np.iinfo(np.uint16).max).all() for x in unused)
    results = {"out": out, "dq": dq, "dk": dk, "dv": dv}

    compact = [cupy.ascontiguousarray(bits(x)).view(BFLOAT16) for x in (q, k, v, dout)]
    other, lse = cufa.attention(*compact[:3], causal=True, return_lse=True, kernel="fwd_5_mma")
    others = cufa.attention_backward(compact[3], *compact[:3], other, lse, causal=True, kernel="bwd_3_mma")
    for name, expected in zip(results, (other, *others), strict=True):
        expected = from_bfloat16(expected)[:, FAR]
        error = from_bfloat16(results[name])[:, FAR] - expected
        length_of_error, length = (cupy.linalg.norm(x, axis=-1) for x in (error, expected))
        assert (length_of_error <= 0.02 * length).all(), name

    q, k, v, dout = (x.get() for x in compact)
    tail = Problem(q[:, LAST], k, v, dout[:, LAST])
    ends = {
        name: cupy.ascontiguousarray(bits(x)[:, LAST]).get().view(BFLOAT16) for name, x in results.items()
    }
    assert_attention(ends.pop("out"), None, tail, causal=True)
    assert_last_gradients(ends, tail)


def assert_last_gradients(gradients, tail):
    """Hold to the rule the gradients of the last rows, and of as many keys, which no row before them sees."""
    q, k, v, dout = tail.q, tail.k, tail.v, tail.dout
    exact = reference.attention_backward(dout, q, k, v, dtype=np.float64, causal=True)
    standard = checking.standard_attention_backward("bfloat16", dout, q, k, v, causal=True)
    rounding = rounding_errors.rounding_of_sums("bfloat16", q, k, v, dout, causal=True)
    for (name, gradient), truth, other in zip(gradients.items(), exact, standard, strict=True):
        ends = gradient, truth[:, LAST], other[:, LAST]
        comparison = checking.compare(*ends, checking.factor(name), name, rounding[name])
        assert comparison.ok, str(comparison)


# ---- waits without end ----

NEVER_RELEASED = ("pipeline.cuh", "ptx::barrier_arrive(empty[at.stage]);", "")
# The backward's warps release the tiles of queries by another function.
NEVER_RELEASED_BY_WARP = ("pipeline.cuh", "arrive_by_warp(ring.empty[at.stage]);", "")
TOO_MANY_BYTES = (
    "wgmma_forward_copies.cuh",
    "ring.announce(at, Rows::kBytes);",
    "ring.announce(at, 2 * Rows::kBytes);",
)

WATCHED_MISTAKES = (TOO_MANY_BYTES, NEVER_RELEASED, NEVER_RELEASED_BY_WARP)

CALLS = """
import cupy, cufa
kernel, dim = {kernel!r}, {dim}
q, k, v = (cupy.ones((1, 4000, 2, dim), "f2") for _ in range(3))  # each block waits, also if rows are split
forward = kernel if kernel.startswith("fwd") else "fwd_5_mma"
out, lse = cufa.attention(q, k, v, return_lse=True, kernel=forward)
if forward != kernel:
    cufa.attention_backward(out, q, k, v, out, lse, kernel=kernel)
cupy.cuda.Device().synchronize()
"""


@pytest.mark.parametrize(
    ("kernel", "mistake"),
    [
        (FORWARD, TOO_MANY_BYTES),
        (FORWARD, NEVER_RELEASED),
        *((kernel, NEVER_RELEASED_BY_WARP) for kernel in BACKWARD),
    ],
)
def test_a_watchdog_ends_a_wait_without_end(tmp_path, kernel, mistake):
    package = tmp_path / "cufa"
    shutil.copytree(Path(cufa.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    planted(package / "kernels", *mistake)
    run = subprocess.run(
        [sys.executable, "-c", CALLS.format(kernel=kernel, dim=256 if kernel in BACKWARD[1:] else 64)],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
            "CUFA_CACHE_DIR": str(tmp_path / "cache"),
            "CUFA_NVRTC_OPTIONS": "-DWATCHDOG_SECONDS=1",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert "cudaErrorLaunchFailure" in run.stderr, run.stderr
    assert "has waited 1 s in " in run.stdout, run.stdout
