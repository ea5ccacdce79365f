"""The backwards of float32 in halves on the emulator: lengths, features, what halves do not hold, races."""

from dataclasses import replace

import numpy as np
import pytest
from emulator import EmulatorError, calls
from feature_cases import SIZES, draw_case, hide_nan, mask_by_tiles, packed_case
from test_emulator import planted
from test_emulator_hopper_features import gradients_of
from tolerance import assert_gradients

from cufa.checking import compare_results
from cufa.reference import attention, attention_backward
from cufa.score_mod import MaskMod

pytestmark = [pytest.mark.emulator, pytest.mark.sampled(3)]

KERNEL, WIDE = "bwd_6_float32", "bwd_7_float32_wide"
FEATURES = [
    (),
    ("causal", "window", "sink", "packed", "seqused_k", "dlse", "dsink"),
    ("causal", "softcap", "alibi_slopes", "dropout"),
    ("causal", "bias", "score_mod"),
    ("causal", "mask", "packed", "dropout", "dlse"),
    ("window", "mask_bits", "seqused_k", "dsink"),
    ("causal", "window", "packed", "seqused_k", "deterministic"),
]
# As compiling takes most of the time, the wide kernel has each feature about once.
BY_KERNEL = [
    *((KERNEL, features) for features in FEATURES),
    *((WIDE, FEATURES[i]) for i in (0, 1, 2, 3, 5, 6)),
]
BY_ARRAYS = {"alibi_slopes", "bias", "mask", "mask_bits"}
each_kernel = pytest.mark.parametrize("kernel", [KERNEL, WIDE])


def sizes_of(kernel, **others):
    """Small ones that the kernel takes; in the wide one, both warpgroups have a part of all dims."""
    return {**SIZES, **({"head_dim": 72, "head_dim_v": 136} if kernel == WIDE else {}), **others}


def check(case, precision="ieee", kernel=KERNEL, **options):
    """Hold the gradients to the rule."""
    with np.errstate(invalid="ignore", over="ignore"):
        gradients = gradients_of(kernel, case, precision=precision, **options)
        assert_gradients(gradients, case.problem, precision=precision, **case.backward)
    return gradients


@pytest.mark.parametrize(("kernel", "features"), BY_KERNEL)
def test_lengths_and_features(rng, kernel, features):
    """Both kernels read what features bring by the same code: one of them with all accesses checked."""
    edges = [(1, 64), (130, 1), (5, 0)] if kernel == KERNEL else []
    for lengths in [(70, 140), (65, 7), (0, 5), *edges]:
        sizes = sizes_of(kernel, seqlen_q=lengths[0], seqlen_k=lengths[1])
        case = draw_case(rng, "float32", features, **sizes)
        hide_nan(case)
        check(case, kernel=kernel, checked=kernel == KERNEL or not BY_ARRAYS & set(features))


@each_kernel
@pytest.mark.parametrize(("rows", "keys"), [([0, 0], [70, 130]), ([70, 130], [0, 0]), ([0], [0])])
def test_packed_sequences_without_any_queries_or_keys(rng, kernel, rows, keys):
    case = packed_case(rng, "float32", 0, rows, keys, after=0, **sizes_of(kernel))
    for gradient in check(case, kernel=kernel):
        assert (gradient == 0).all()


@pytest.mark.parametrize(("kernel", "by"), [(KERNEL, "mask"), (WIDE, "mask_mod")])
def test_tiles_of_which_nothing_is_seen(rng, kernel, by):
    """What is in their queries and keys shows nowhere; of some tiles of keys there is nothing to do."""
    sizes = sizes_of(kernel, seqlen_q=270, seqlen_k=140)
    case = draw_case(rng, "float32", (), **sizes)
    mask, _ = mask_by_tiles(rng, (2, 2, 270, 140), (64, 64))
    mask[0, :, :, 64:128], mask[1, 1, 192:] = False, False
    if by == "mask":
        case.arrays["mask"] = mask
    else:
        case.numbers["mask_mod"] = MaskMod(
            lambda b, h, q_idx, kv_idx, shown: shown[b, h, q_idx, kv_idx], mask
        )
    hide_nan(case)
    check(case, kernel=kernel)


@pytest.mark.parametrize(
    ("kernel", "dims", "precision"),
    [
        *((KERNEL, (33, 127), precision) for precision in ("ieee", "tf32")),
        *((WIDE, dims, "ieee") for dims in [(136, 137), (256, 256), (256, 40)]),
        *((WIDE, dims, "tf32") for dims in [(256, 256), (64, 200), (192, 128)]),
    ],
)
def test_head_dims(rng, kernel, dims, precision):
    """Rows that are read an element at a time, and parts of dims with one panel more or none."""
    sizes = {"batch": 1, "seqlen_q": 140, "seqlen_k": 150, "heads": 1, "kv_heads": 1}
    case = draw_case(rng, "float32", ("causal",), head_dim=dims[0], head_dim_v=dims[1], **sizes)
    check(case, precision=precision, kernel=kernel, checked=False)


def test_the_error_of_dq_where_all_keys_are_the_same(rng):
    """dP - D is zero but for errors, which add up: what tensor cores truncate shows as nowhere else."""
    sizes = sizes_of(WIDE, heads=8, kv_heads=8, head_dim=192, head_dim_v=192, seqlen_q=70, seqlen_k=140)
    case = draw_case(rng, "float32", ("causal",), **sizes)
    problem = case.problem
    for keys in (problem.k, problem.v):
        keys[:] = keys[:, :1]
    dq, *_ = gradients_of(WIDE, case, checked=False)
    inputs = problem.q, problem.k, problem.v, problem.dout
    (of_dq,) = compare_results(*inputs, {"dq": dq}, causal=True)
    # 3.4e-6 with these inputs, and half as much again if scores were one product each. What is allowed
    # depends on the CPU's BLAS, by which standard attention has its error.
    assert of_dq.error < 4.3e-6, str(of_dq)


# Features in turn: compiling takes most of the time.
@pytest.mark.parametrize(
    ("tiles", "features"),
    [
        ({"block_m": 32}, ("causal", "mask", "dropout")),
        ({"block_m": 32, "stages": 1}, ("window", "packed", "softcap", "dsink")),
        ({"stages": 1}, ("causal",)),
    ],
    ids=str,
)
def test_tiles_of_fewer_queries(rng, tiles, features):
    case = draw_case(rng, "float32", features, batch=1, seqlen_q=170, seqlen_k=140, **sizes_of(WIDE, heads=1))
    hide_nan(case)
    check(case, kernel=WIDE, tiles=tiles)


@each_kernel
@pytest.mark.parametrize("exponent", [30, 60])
def test_tiles_in_units_of_their_own(rng, kernel, exponent):
    """Of queries so large that halves hold them, and larger."""
    sizes = sizes_of(kernel, batch=1, seqlen_q=150, seqlen_k=150)
    case = draw_case(rng, "float32", ("causal",), **sizes)
    problem = case.problem
    exponents = (exponent, -exponent - 2, 20, -50)
    for x, unit in zip((problem.q, problem.k, problem.v, problem.dout), exponents, strict=True):
        x[:] = np.ldexp(x, unit + rng.integers(0, 3, (1, x.shape[1], 1, 1)))
    problem.dout[:, 64:128] = 0
    check(case, kernel=kernel, checked=False)


@pytest.mark.parametrize(
    ("kernel", "features", "name", "value"),
    [
        (KERNEL, ("causal", "softcap", "dropout"), "q", 1e6),
        (WIDE, ("mask", "alibi_slopes"), "k", -1e6),
        (KERNEL, ("mask", "dropout", "bias"), "v", 1e30),
        (WIDE, ("causal", "score_mod"), "dout", 1e30),
    ],
)
def test_features_of_what_halves_do_not_hold(rng, kernel, features, name, value):
    case = draw_case(rng, "float32", features, batch=1, seqlen_q=100, seqlen_k=100, **sizes_of(kernel))
    getattr(case.problem, name)[:, 60, :, 3] = value
    hide_nan(case)
    check(case, kernel=kernel)


@each_kernel
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("q", 1e6), ("k", 1e6), ("v", -1e30), ("dout", 1e30), ("v", np.inf)),
        *((name, np.nan) for name in ("q", "k", "v", "dout")),
    ],
)
def test_what_a_mask_hides_with_others(rng, kernel, name, value):
    """Rows that some see and some do not, with what would leave those beside it no bits, or be NaN."""
    case = draw_case(rng, "float32", ("causal",), batch=1, seqlen_q=100, seqlen_k=100, **sizes_of(kernel))
    row = getattr(case.problem, name)[:, 60]
    row[:, 0, 3] = row[:, -1, 14] = value
    dq, *_ = check(case, kernel=kernel, checked=False)
    assert np.isfinite(dq[:, :60]).all()


@each_kernel
@pytest.mark.parametrize(
    ("name", "value"), [("dout", -np.inf), ("dlse", np.inf), ("dlse", 1e10), ("dlse", -3e38)], ids=str
)
def test_a_row_that_leaves_others_of_its_tile_no_bits(rng, kernel, name, value):
    """No mask hides it, but nor is dQ of the others a sum with it."""
    case = draw_case(rng, "float32", ("dlse",), batch=1, seqlen_q=70, seqlen_k=64, **sizes_of(kernel))
    problem, row = case.problem, 40
    inputs = problem.q, problem.k, problem.v
    exact, *_ = attention_backward(problem.dout, *inputs, dlse=case.dlse)
    changed = replace(case, problem=replace(problem, dout=problem.dout.copy()), dlse=case.dlse.copy())
    if name == "dout":
        changed.problem.dout[:, row, :, 3] = value
    else:
        changed.dlse[..., row] = value
    dq, *_ = gradients_of(kernel, changed)
    dq[:, row] = exact[:, row]
    (of_dq,) = compare_results(*inputs, problem.dout, {"dq": dq}, dlse=case.dlse)
    assert of_dq.ok, str(of_dq)


@each_kernel
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_weights_over_one(rng, kernel, precision):
    """As other roundings of large scores give them: finite still, so that rows without dO have no part."""
    sizes = sizes_of(kernel, batch=1, seqlen_q=70, seqlen_k=80, logit_scale=20)
    problem = draw_case(rng, "float32", (), **sizes).problem
    inputs = problem.q, problem.k, problem.v
    problem.dout[:, 30] = 0
    out, lse = (x.astype(np.float32) for x in attention(*inputs))
    lse[..., 30] -= 5
    gradients = calls.attention_backward(
        problem.dout, *inputs, out, lse, kernel=kernel, precision=precision, checked=False
    )
    assert_gradients(gradients, problem, precision=precision)


# The order of blocks, planted.
LAST_FIRST = (
    "kLeastHeads>(call, block)",
    "kLeastHeads>(call, Workspace(call).key_tiles * call.sizes.kv_heads - 1 - block)",
)


@pytest.mark.parametrize(("kernel", "features"), [(KERNEL, ("window", "packed")), (WIDE, ("causal",))])
def test_blocks_in_another_order_give_the_same_bits(rng, tmp_path, kernel, features):
    """Each block waits for those with earlier keys, even where halves do not hold all tiles."""
    sizes = sizes_of(kernel, batch=1, heads=2, kv_heads=2, seqlen_q=200, seqlen_k=210)
    case = draw_case(rng, "float32", (*features, "deterministic"), **sizes)
    if kernel == WIDE:  # of more dims, so large a key costs more bits than the rule allows
        case.problem.v[..., 70, :, 3] = 1e5
    else:
        case.problem.k[..., 70, :, 3] = 1e6
    first = check(case, kernel=kernel, checked=False)
    folder = planted(tmp_path, "backward_tiles.cuh", *LAST_FIRST)
    for one, other in zip(first, check(case, kernel=kernel, checked=False, folder=folder), strict=True):
        np.testing.assert_array_equal(one, other)


@each_kernel
def test_blocks_that_do_not_wait_for_their_turn(rng, tmp_path, kernel):
    sizes = sizes_of(kernel, batch=1, seqlen_q=200, seqlen_k=210)
    case = draw_case(rng, "float32", ("deterministic",), **sizes)
    folder = planted(tmp_path, "backward_tiles.cuh", *LAST_FIRST)
    first, *_ = check(case, kernel=kernel, checked=False, folder=folder)
    turns = folder / "hopper" / "float32" / "addition_turns.cuh"
    waiting = "ptx::load_acquire(taken) < earlier"
    assert waiting in turns.read_text()
    turns.write_text(turns.read_text().replace(waiting, "false"))
    other, *_ = gradients_of(kernel, case, checked=False, folder=folder)
    assert (first != other).any()


def test_a_turn_passed_on_before_the_sums_are_there(rng, tmp_path):
    folder = planted(tmp_path, "bwd_6_float32.cu", "ptx::wait_stores();", "")
    with pytest.raises(EmulatorError, match="signals before what it adds is there"):
        check(draw_case(rng, "float32", ("deterministic",), seqlen_q=1, seqlen_k=20, **SIZES), folder=folder)


@pytest.mark.parametrize(
    ("kernel", "waiting"),
    [
        (KERNEL, "smem.dout_rings[warpgroup].wait_full(at);"),
        (WIDE, "smem.dout_ring.wait_full(at); issue_parts"),
    ],
)
def test_a_tile_that_is_not_waited_for(rng, tmp_path, kernel, waiting):
    without = waiting.partition(";")[2]
    folder = planted(tmp_path, f"{kernel[:5]}_consumer.cuh", waiting, without)
    case = draw_case(rng, "float32", (), seqlen_q=1, seqlen_k=20, **sizes_of(kernel))
    with pytest.raises(EmulatorError, match="shared memory"):
        check(case, kernel=kernel, folder=folder)


# What orders warpgroups that write where others read, or read what others write.
@pytest.mark.parametrize(
    ("kernel", "meeting"),
    [
        (KERNEL, "if constexpr (Part == kFirstOfQueries) meet_warpgroup();"),
        (WIDE, "meet_all();  // no product reads P^T or dS^T, which were here before"),
        (WIDE, "meet_all();  // all have given theirs"),
        (WIDE, "ptx::named_barrier_sync<Warps * 32>(barrier);"),  # all have taken the others'
        (WIDE, "meet_all();  // P^T and dS^T are there"),
    ],
)
def test_warpgroups_that_do_not_meet(rng, tmp_path, kernel, meeting):
    header = "key_scores" if "Warps" in meeting else f"{kernel[:5]}_consumer"
    folder = planted(tmp_path, f"{header}.cuh", meeting, "")
    case = draw_case(rng, "float32", (), seqlen_q=130, seqlen_k=20, **sizes_of(kernel))
    # With one stage, no warpgroup has the next tile before all have released this one.
    tiles = {"block_m": 32, "stages": 2} if kernel == WIDE else {}
    with pytest.raises(EmulatorError, match=r"race|which no thread has written"):
        check(case, kernel=kernel, folder=folder, tiles=tiles)
