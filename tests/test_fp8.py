"""The Hopper forward of 8-bit operands: plans, what the compiler makes of it, arguments, the CPU path.

None of it needs a GPU.
"""

import itertools
from dataclasses import asdict, replace

import machine_code
import ml_dtypes
import numpy as np
import pytest
from feature_cases import draw_case
from float8 import assert_float8, random_descales, transposed, with_values_transposed
from machine_code import EXPONENTIAL, WAIT
from rungs import best_kernel
from tolerance import random_problem

import cufa
from cufa import jit
from cufa.device import Device
from cufa.kernels import KERNELS
from cufa.plan import make_plan
from cufa.plan.fwd_7_fp8 import (
    CUT_PACES,
    CUT_TRANSPOSED_PACES,
    PACES,
    TRANSPOSED_PACES,
    TransposedTiles,
    parts_leave_registers,
)
from cufa.problem import FLOAT8, Features, Problem

H200 = Device.of("sm_90a")
NAME, FEW_QUERIES = "fwd_7_fp8", "fwd_8_split_kv"
SHORT, LONG = 512, 8192


def problem(head_dim=128, value_dim=None, causal=False, seqlen=LONG, **options):
    """A call; the options are fields of `Problem`, or features."""
    of_problem = {name: options.pop(name) for name in ("out_dtype", "transposed_values") if name in options}
    dims = head_dim, value_dim or head_dim
    return Problem(
        "forward",
        FLOAT8,
        *(2, seqlen, seqlen, 4, 2, *dims),
        causal,
        features=Features(**options),
        **of_problem,
    )


def compiled(call):
    return jit.build(make_plan(call, H200).variant)


DIMS_AND_LENGTHS = [*((head_dim, LONG) for head_dim in (64, 128, 192, 256)), (128, SHORT), (256, SHORT)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "seqlen"), DIMS_AND_LENGTHS)
def test_no_spill_and_no_product_in_series(head_dim, causal, seqlen):
    assert compiled(problem(head_dim, causal=causal, seqlen=seqlen)).warnings == ()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("head_dim", "features"),
    [
        (128, {"window": (100, None)}),
        (256, {"softcap": True}),
        (128, {"sink": True}),
        (256, {"seqused_k": True}),
    ],
    ids=lambda value: "".join(value) if isinstance(value, dict) else str(value),
)
def test_features_spill_nothing(head_dim, features):
    assert compiled(problem(head_dim, **features)).warnings == ()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("head_dim", "seqlen"), DIMS_AND_LENGTHS)
def test_transposed_values_spill_nothing(head_dim, causal, seqlen):
    build = compiled(problem(head_dim, causal=causal, seqlen=seqlen, transposed_values=True))
    assert build.warnings == ()


@pytest.mark.parametrize(
    "features", [{"window": (100, None)}, {"softcap": True}, {"seqused_k": True}], ids="".join
)
def test_features_with_transposed_values_spill_nothing(features):
    assert compiled(problem(transposed_values=True, **features)).warnings == ()


@pytest.mark.parametrize(
    ("batch", "heads", "seqlen", "causal", "parts"),
    [
        (1, 4, 4096, True, 2),
        (1, 8, 4096, True, 1),
        (1, 5, 8192, False, 2),
        (1, 16, 16384, False, 1),  # a last round of many
    ],
)
def test_keys_are_parted_where_sms_would_be_idle(batch, heads, seqlen, causal, parts):
    call = replace(problem(causal=causal, seqlen=seqlen), batch=batch, heads=heads, kv_heads=heads)
    plan = make_plan(call, H200)
    assert plan.tiles["key_parts"] == parts
    assert [launch.entry for launch in plan.launches] == ["clear_counts", NAME][parts == 1 :]


@pytest.mark.parametrize(("queries", "keys"), [(32768, 4096), (8192, 100)])
def test_many_tiles_are_not_parted_where_most_rows_see_no_key(queries, keys):
    """Parts would take several times the memory of the output."""
    call = replace(problem(64, causal=True), batch=64, heads=64, kv_heads=64, seqlen_q=queries, seqlen_k=keys)
    assert make_plan(call, H200, NAME).workspace_bytes == 0


# Tiles of both kinds of calls are compiled for causal ones, with a soft cap, which need more registers.
PARTED = {
    (head_dim, tiles): causal
    for causal, paces in (
        (False, PACES),
        (False, TRANSPOSED_PACES),
        (True, CUT_PACES),
        (True, CUT_TRANSPOSED_PACES),
    )
    for head_dim, of_dim in paces.items()
    for tiles in of_dim
    if parts_leave_registers(problem(head_dim), tiles)
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("head_dim", "tiles"), PARTED, ids=str)
def test_no_spill_in_parts(head_dim, tiles):
    causal = PARTED[head_dim, tiles]
    transposes = isinstance(tiles, TransposedTiles)
    call = problem(head_dim, causal=causal, transposed_values=transposes, softcap=causal, sink=True)
    plan = make_plan(call, H200, NAME, asdict(replace(tiles, key_parts=2)))
    assert jit.build(plan.variant).warnings == ()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dims", [(16, 16), (48, 200), (96, 80), (7, 255)])
def test_any_head_dims_compile(dims):
    warnings = compiled(problem(*dims, out_dtype="float16")).warnings
    assert not [line for line in warnings if "spill" not in line]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_products_are_issued_together(head_dim):
    """Within a run of products there is no wait, which the compiler would put in if it had doubts."""
    call = problem(head_dim)
    runs = machine_code.runs(compiled(call), "QGMMA", WAIT, EXPONENTIAL)
    products = [length for mark, length in runs if mark == "QGMMA"]
    block_n = make_plan(call, H200).tiles["block_n"]
    assert max(products) == head_dim // 32 + block_n // 32
    assert min(products) >= min(head_dim, block_n) // 32


def test_who_takes_it():
    assert best_kernel(problem(), H200) is KERNELS[NAME]
    with pytest.raises(ValueError, match="fwd_7_fp8 needs sm_90a"):
        make_plan(problem(), Device.of("sm_100a"), NAME)
    with pytest.raises(ValueError, match="fwd_7_fp8 does not support dropout_p"):
        best_kernel(problem(dropout=True), H200)
    with pytest.raises(ValueError, match="block_n must be a multiple of 32"):
        make_plan(problem(), H200, tiles={"block_n": 48})
    with pytest.raises(ValueError, match="fwd_7_fp8 does not support transposed values in packed sequences"):
        best_kernel(problem(transposed_values=True, packed=True), H200)
    for transposed_values in (False, True):
        with pytest.raises(ValueError, match="block_n must be a multiple of 32, over 128 of 64"):
            make_plan(problem(64, transposed_values=transposed_values), H200, tiles={"block_n": 160})


@pytest.mark.parametrize(("head_dim", "value_dim"), [(40, 40), (66, 64), (64, 20)])
def test_values_that_lie_transposed_are_copied_where_rows_are_no_multiple_of_16_bytes(
    rng, head_dim, value_dim
):
    sizes = {"seqlen_q": 16, "seqlen_k": 64, "head_dim": head_dim, "head_dim_v": value_dim}
    q, k, v, _ = vars(random_problem(rng, "float8_e4m3fn", **sizes)).values()
    plan = cufa.plan(q, k, transposed(v), arch="sm_90a")
    assert (plan.kernel, plan.problem.transposed_values) == (FEW_QUERIES, False)


def test_plans_know_values_that_lie_transposed(arrays):
    v = transposed(arrays.v)
    for plan, lies in (
        (cufa.plan(arrays.q, arrays.k, v, arch="sm_90a"), True),
        (cufa.plan(arrays.q, arrays.k, arrays.v, arch="sm_90a"), False),
        (cufa.plan(*(x.swapaxes(1, 2) for x in (arrays.q, arrays.k, v)), arch="sm_90a", layout="bhsd"), True),
    ):
        assert plan.problem.transposed_values == lies
        assert ("values transposed" in str(plan)) == lies
        assert dict(plan.macros)["TRANSPOSED_VALUES"] == lies


@pytest.mark.parametrize("transposed_values", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_registers_are_those_of_the_block(causal, transposed_values):
    for head_dim, seqlen in itertools.product((64, 128, 192, 256), (SHORT, LONG)):
        plan = make_plan(problem(head_dim, None, causal, seqlen, transposed_values=transposed_values), H200)
        macros, block = dict(plan.macros), plan.launches[-1].block
        consumers = plan.tiles["block_m"] // 64
        others = block // 128 - consumers
        assert others == {3: 1, 4: 2}[plan.tiles["helpers"]]
        taken = consumers * macros["CONSUMER_REGISTERS"] + others * macros["PRODUCER_REGISTERS"]
        assert taken == H200.registers_per_sm // block // 8 * 8 * (consumers + others)


def test_small_blocks_leave_registers_for_helpers_apart():
    small = {
        "block_m": 64,
        "block_n": 32,
        "stages": 2,
        "query_stages": 1,
        "store_cols": 64,
        "blocks_per_sm": 2,
    }
    plan = make_plan(problem(32), H200, tiles={**small, "helpers": 4})
    assert dict(plan.macros)["PRODUCER_REGISTERS"] >= 24
    jit.build(plan.variant)


def test_other_blocks_have_their_helpers_beside_the_producer():
    call = problem(causal=True, seqlen=SHORT)
    same = {"block_m": 128, "block_n": 128, "stages": 2}
    others = {"block_m": 192, "block_n": 96, "query_stages": 1, "store_cols": 64}, {"block_n": 96}
    for tiles, helpers in (({}, 4), (same, 4), *((other, 3) for other in others)):
        assert make_plan(call, H200, tiles=tiles).tiles["helpers"] == helpers


@pytest.mark.parametrize(
    ("head_dim", "tiles", "reason"),
    [
        (128, {"helpers": 2}, "helpers is 2; it must be 3, or 4 for a warpgroup of their own"),
        (128, {"block_m": 192, "block_n": 96, "helpers": 4}, "helpers must be 3 if block_m is more than 128"),
        (192, {"helpers": 4}, "helpers must be 3 with a value_dim of more than 128; it is 192"),
    ],
)
def test_helpers_that_do_not_fit_are_refused(head_dim, tiles, reason):
    with pytest.raises(ValueError, match=reason):
        make_plan(problem(head_dim), H200, tiles=tiles)


# ---- on the CPU ----


@pytest.fixture
def arrays(rng):
    return random_problem(
        rng, FLOAT8, batch=2, seqlen_q=50, seqlen_k=60, heads=4, kv_heads=2, head_dim=32, head_dim_v=16
    )


def test_attention_on_the_cpu(rng, arrays):
    descales = random_descales(rng, 2, 2)
    options = {"causal": True, "softcap": 2.0}
    out, lse = cufa.attention(
        arrays.q, arrays.k, arrays.v, return_lse=True, backend="numpy", **descales, **options
    )
    assert (out.dtype, out.shape) == (ml_dtypes.bfloat16, (2, 50, 4, 16))
    assert_float8(out, lse, arrays, descales, **options)


def test_transposed_values_on_the_cpu(arrays):
    options = {"causal": True, "backend": "numpy"}
    expected = cufa.attention(arrays.q, arrays.k, arrays.v, **options)
    out = cufa.attention(arrays.q, arrays.k, with_values_transposed(arrays).v, **options)
    np.testing.assert_array_equal(out, expected)


def test_layout_and_output(rng, arrays):
    descales = random_descales(rng, 2, 2)
    q, k, v = (x.swapaxes(1, 2) for x in (arrays.q, arrays.k, arrays.v))
    out = np.empty((2, 4, 50, 16), np.float16)
    _, lse = cufa.attention(
        q, k, v, layout="bhsd", out=out, return_lse=True, backend="numpy", v_descale=descales["v_descale"]
    )
    assert_float8(out.swapaxes(1, 2), lse, arrays, {"v_descale": descales["v_descale"]})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_keys_and_values_alone_on_the_cpu(rng, arrays, dtype):
    descales = random_descales(rng, 2, 2, ("k_descale", "v_descale"))
    mixed = replace(arrays, q=arrays.q.astype(dtype))
    options = {"window": (20, 5), "return_lse": True, **descales}
    out, lse = cufa.attention(mixed.q, mixed.k, mixed.v, backend="numpy", **options)
    assert out.dtype == dtype
    assert_float8(out, lse, mixed, descales, window=(20, 5))


@pytest.mark.parametrize(
    ("dtypes", "arguments", "error", "message"),
    [
        (
            ("float32", FLOAT8, FLOAT8),
            {},
            TypeError,
            "k has dtype .* and q float32; .*, or q bfloat16 or float16",
        ),
        (
            ("bfloat16", "bfloat16", FLOAT8),
            {},
            TypeError,
            "v has dtype .* and k bfloat16; they must be the same",
        ),
        (
            (FLOAT8, "float16", "float16"),
            {},
            TypeError,
            "k has dtype float16 and q float8_e4m3fn; they must be",
        ),
        (
            ("bfloat16", FLOAT8, FLOAT8),
            {"q_descale": np.ones((2, 2), np.float32)},
            ValueError,
            "q_descale is given, which is for float8_e4m3fn, and q is bfloat16",
        ),
        (
            ("float16", FLOAT8, FLOAT8),
            {"return_attn_probs": True},
            ValueError,
            "and k and v are float8_e4m3fn",
        ),
    ],
)
def test_what_is_refused_of_dtypes_together(arrays, dtypes, arguments, error, message):
    q, k, v = (x.astype(dtype) for x, dtype in zip((arrays.q, arrays.k, arrays.v), dtypes, strict=True))
    with pytest.raises(error, match=message):
        cufa.attention(q, k, v, backend="numpy", **arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"out": np.empty((2, 50, 4, 16), np.float32)},
            TypeError,
            "out has dtype float32; it may be bfloat16",
        ),
        ({"q_descale": np.ones((2, 4), np.float32)}, ValueError, r"q_descale has shape \(2, 4\)"),
        (
            {"v_descale": np.float32(0.5)},
            TypeError,
            r"v_descale is 0.5; it must be an array of \(batch, kv_heads",
        ),
        (
            {"k_descale": np.array(0.5)},
            ValueError,
            r"k_descale has shape \(\); it .* \(batch, kv_heads\), which is \(2, 2\)",
        ),
        ({"k_descale": np.ones((2, 2))}, TypeError, "k_descale has dtype float64; it must be float32"),
        ({"return_attn_probs": True}, ValueError, "return_attn_probs is True"),
    ],
)
def test_what_is_refused(arrays, arguments, error, message):
    with pytest.raises(error, match=message):
        cufa.attention(arrays.q, arrays.k, arrays.v, backend="numpy", **arguments)


@pytest.mark.parametrize(("dtype", "first"), [(FLOAT8, "q"), ("bfloat16", "k")])
def test_there_are_no_gradients(arrays, dtype, first):
    q, dout = (x.astype(dtype) for x in (arrays.q, arrays.dout))
    with pytest.raises(TypeError, match=f"^{first} has dtype float8_e4m3fn, which has no gradients"):
        cufa.attention_backward(
            *(dout, q, arrays.k, arrays.v, dout, np.zeros((2, 4, 50), np.float32)), backend="numpy"
        )


@pytest.mark.parametrize("shape", [(2, 2), (2,)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_descales_are_for_8_bits(arrays, dtype, shape):
    """Whatever the shape and the dtype of the descale: there is none that would do."""
    wide = [x.astype(dtype) for x in (arrays.q, arrays.k, arrays.v)]
    with pytest.raises(ValueError, match=f"v_descale is given, which is for {FLOAT8}, and v is {dtype}"):
        cufa.attention(*wide, v_descale=np.ones(shape, np.float32), backend="numpy")


def test_descales_of_packed_sequences(rng, arrays):
    """Each sequence has its own; some tokens are in none."""
    packed = {name: x.reshape(-1, *x.shape[2:]) for name, x in vars(arrays).items()}
    packed = type(arrays)(**packed)
    ends = {
        "cu_seqlens_q": np.array([2, 2, 31, 99], np.int32),
        "cu_seqlens_k": np.array([0, 7, 40, 120], np.int32),
    }
    descales = random_descales(rng, 3, 2)
    options = {**ends, "causal": True, "return_lse": True}
    out, lse = cufa.attention(packed.q, packed.k, packed.v, **options, **descales, backend="numpy")
    assert_float8(out, lse, packed, descales, **ends, causal=True)
    for number in range(1, 3):
        of_q, of_k = (slice(*ends[name][number : number + 2]) for name in ends)
        parts = packed.q[None, of_q], packed.k[None, of_k], packed.v[None, of_k]
        its_own = {name: x[number : number + 1] for name, x in descales.items()}
        alone = cufa.attention(*parts, **its_own, causal=True, backend="numpy")
        np.testing.assert_array_equal(out[of_q], alone[0])


def test_descales_of_keys_in_pages(rng, arrays):
    """They are a sequence's, whoever else may have the page."""
    pages = [x.reshape(12, 10, *x.shape[2:]) for x in (arrays.k, arrays.v)]
    table = np.arange(12, dtype=np.int32).reshape(2, 6)
    table[1, :3] = table[0, :3]
    descales = random_descales(rng, 2, 2)
    options = {"return_lse": True, "backend": "numpy", **descales}
    out, lse = cufa.attention(arrays.q, *pages, block_table=table, **options)
    assert_float8(out, lse, replace(arrays, k=pages[0], v=pages[1]), descales, block_table=table)
    k, v = (x[table].reshape(2, 60, *x.shape[2:]) for x in pages)
    expected, _ = cufa.attention(arrays.q, k, v, **options)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("sizes", [{"heads": 0, "kv_heads": 0}, {"batch": 0}])
def test_descales_of_no_keys_in_pages(rng, sizes):
    case = draw_case(rng, FLOAT8, {"block_table"}, seqlen_q=5, seqlen_k=9, **sizes)
    problem = case.problem
    batch = len(case.arrays["block_table"])
    descales = {"k_descale": np.ones((batch, problem.k.shape[2]), np.float32)}
    inputs = problem.q, problem.k, problem.v
    out, lse = cufa.attention(*inputs, **case.forward, **descales, return_lse=True, backend="numpy")
    assert_float8(out, lse, problem, descales, **case.forward)


# ---- few queries ----


def test_who_takes_few_queries():
    few = replace(problem(), seqlen_q=1)
    assert best_kernel(few, H200) is KERNELS[FEW_QUERIES]
    for arch in ("sm_89", "sm_120"):
        assert best_kernel(problem(), Device.of(arch)) is KERNELS[FEW_QUERIES]
    with pytest.raises(ValueError, match="fwd_8_split_kv needs tensor cores for float8_e4m3fn, which sm_86"):
        best_kernel(few, Device.of("sm_86"))
    assert best_kernel(replace(few, transposed_values=True), H200) is KERNELS[NAME]
    with pytest.raises(ValueError, match="fwd_8_split_kv does not support values stored transposed"):
        best_kernel(replace(few, transposed_values=True), Device.of("sm_89"))
    with pytest.raises(ValueError, match="block_n must be a multiple of 32"):
        make_plan(few, H200, FEW_QUERIES, {"block_n": 16})


def test_who_takes_keys_and_values_alone():
    mixed = replace(problem(), dtype="bfloat16", kv_dtype=FLOAT8)
    for device in (H200, Device.of("sm_89")):
        assert best_kernel(mixed, device) is KERNELS[FEW_QUERIES]
    beside = "k and v in float8_e4m3fn beside q in bfloat16"
    for name in ("fwd_5_mma", "fwd_6_wgmma", NAME):
        with pytest.raises(ValueError, match=f"{name} does not support {beside}"):
            make_plan(mixed, H200, name)
    with pytest.raises(ValueError, match=r"bfloat16 with keys and values in float8.* not support dropout_p$"):
        best_kernel(replace(mixed, features=Features(dropout=True)), H200)
    with pytest.raises(ValueError, match="needs tensor cores for float8_e4m3fn, which sm_80 does not have"):
        best_kernel(mixed, Device.of("sm_80"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("dtype", "seqlen_q"), [(FLOAT8, 1), (FLOAT8, 32), ("bfloat16", 1)])
def test_few_queries_spill_nothing(head_dim, dtype, seqlen_q):
    of_keys = None if dtype == FLOAT8 else FLOAT8
    call = replace(problem(head_dim), seqlen_q=seqlen_q, dtype=dtype, kv_dtype=of_keys)
    assert jit.build(make_plan(call, H200, FEW_QUERIES).variant).warnings == ()
