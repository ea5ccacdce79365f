"""float32 in halves: plans, and what the compiler makes of the kernel. None of it needs a GPU."""

from dataclasses import replace

import pytest
from rungs import best_kernel

from cufa import jit
from cufa.device import Device
from cufa.plan import make_plan
from cufa.plan.fwd_9_float32 import PACES
from cufa.problem import Features, Problem

H200 = Device.of("sm_90a")
NAME, BACKWARD, WIDE = "fwd_9_float32", "bwd_6_float32", "bwd_7_float32_wide"
ALL = Features(window=(9, 9), softcap=True, alibi=True, sink=True, packed=True, seqused_k=True)


def problem(head_dim=128, value_dim=None, causal=False, seqlen=4096, align_bytes=16, **features):
    return Problem(
        *("forward", "float32", 2, seqlen, seqlen, 4, 2, head_dim, value_dim or head_dim, causal),
        align_bytes=align_bytes,
        features=Features(**features),
    )


def warnings_of(call, **tiles):
    return jit.build(make_plan(call, H200, NAME, tiles).variant).warnings


PACED = [(tf32, dim, tiles) for tf32, of_dims in PACES.items() for dim in of_dims for tiles in of_dims[dim]]


# A mask or none in turn: compiling takes most of the time.
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("tf32", "dim", "tiles", "causal"), [(*each, i % 2 == 1) for i, each in enumerate(PACED)], ids=str
)
def test_no_spill_and_no_product_in_series(tf32, dim, tiles, causal):
    assert warnings_of(problem(dim, causal=causal, tf32=tf32), **vars(tiles)) == ()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (33, 127), (100, 180)])
@pytest.mark.parametrize("tf32", [False, True])
def test_no_spill_with_features(head_dim, value_dim, tf32):
    features = replace(ALL, tf32=tf32)
    assert warnings_of(replace(problem(head_dim, value_dim, align_bytes=4), features=features)) == ()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192])
@pytest.mark.parametrize("tf32", [False, True])
def test_no_spill_with_dropout(dim, tf32):
    assert warnings_of(problem(dim, dropout=True, tf32=tf32)) == ()


# Of 256 dims in two halves, what features need besides: for each tile of keys a word or two are read again.
SPILLED_BYTES = 112


@pytest.mark.parametrize(
    "features", [ALL, Features(dropout=True), Features(mask=(2, 1, 4096, 4096))], ids=str
)
def test_wide_heads_spill_little_with_features(features):
    build = jit.build(make_plan(replace(problem(256), features=features), H200, NAME).variant)
    assert build.resources[NAME].spill_stores <= SPILLED_BYTES
    assert all("bytes spill" in line for line in build.warnings)


def test_masks_are_looked_at_first():
    masked = make_plan(problem(mask=(2, 1, 4096, 4096)), H200, NAME)
    assert [launch.entry for launch in masked.launches] == ["seen_tiles", "to_halves", NAME]
    tiles = -(-4096 // masked.tiles["block_m"]) * -(-4096 // masked.tiles["block_n"])
    assert masked.workspace_bytes - make_plan(problem(), H200, NAME).workspace_bytes == 2 * 2 * tiles
    with pytest.raises(ValueError, match="block_n may be at most 128"):
        make_plan(problem(32, mask=(2, 1, 4096, 4096)), H200, NAME, {"block_n": 160, "stages": 1})


def test_which_calls_it_takes():
    assert best_kernel(problem(), H200).name == NAME
    assert best_kernel(problem(64, tf32=True), H200).name == NAME
    assert best_kernel(problem(80, align_bytes=4), H200).name == NAME
    assert best_kernel(problem(dropout=True, mask=(1, 1, 4096, 4096)), H200).name == NAME
    assert best_kernel(problem(40, 256), H200).name == NAME
    for other in (problem(264), problem(seqlen=16), problem(page_size=16)):
        assert best_kernel(other, H200).name == "fwd_5_mma"
    assert best_kernel(problem(), Device.of("sm_100")).name == "fwd_5_mma"


def test_its_workspace_has_both_halves_of_each_element():
    call = problem()
    elements = 2 * 4096 * (4 + 2 + 2) * 128
    assert 0 <= make_plan(call, H200).workspace_bytes - 4 * elements < 0.04 * 4 * elements
    tf32 = make_plan(problem(tf32=True), H200)
    assert 0 <= tf32.workspace_bytes - 2 * elements < 0.06 * 2 * elements


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="block_m must be a multiple of 64"):
        make_plan(problem(), H200, NAME, {"block_m": 32})
    with pytest.raises(
        ValueError, match="block_m is 512, for which a block needs 1,152 threads; it may have 1,024"
    ):
        make_plan(problem(), H200, NAME, {"block_m": 512})
    with pytest.raises(ValueError, match="does not support block_table"):
        make_plan(problem(page_size=4), H200, NAME)
    with pytest.raises(ValueError, match="block_n must be a multiple of 32"):
        make_plan(problem(), H200, NAME, {"block_n": 48})
    with pytest.raises(ValueError, match="bytes of shared memory"):
        make_plan(problem(), H200, NAME, {"stages": 4})


def backward(*args, **options):
    return replace(problem(*args, **options), direction="backward")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("dim", "tf32", "deterministic"),
    [(64, False, False), (64, True, False), (96, True, False), (64, False, True), (64, True, True)],
)
@pytest.mark.parametrize("causal", [False, True])
def test_the_backward_has_its_sums_in_registers(dim, tf32, deterministic, causal):
    call = backward(dim, causal=causal, tf32=tf32, deterministic=deterministic)
    assert jit.build(make_plan(call, H200, BACKWARD).variant).warnings == ()


def test_no_product_of_the_backward_is_in_series():
    """At head dim 128 some addresses are spilled, and nothing worse is said."""
    warnings = jit.build(make_plan(backward(128), H200, BACKWARD).variant).warnings
    assert all("spill stores" in line for line in warnings)


# Of the wide backward, at most.
SPILLED_OF_TF32, SPILLED_WITH_FEATURES = 200, 32


WIDE_CALLS = [
    *((dims, False, False) for dims in ((160, 160), (192, 192), (192, 128), (64, 256), (256, 256))),
    *((dims, True, False) for dims in ((192, 192), (256, 256))),
    *((dims, False, True) for dims in ((192, 192), (256, 256))),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("dims", "tf32", "deterministic"), WIDE_CALLS, ids=str)
def test_the_wide_backward_has_its_sums_in_registers(dims, tf32, deterministic):
    call = backward(*dims, causal=not deterministic, tf32=tf32, deterministic=deterministic)
    plan = make_plan(call, H200)
    assert plan.kernel == WIDE
    build = jit.build(plan.variant)
    # Of the most dims, tf32 has twice as many queries: a few addresses are spilled.
    most = SPILLED_OF_TF32 if tf32 and dims == (256, 256) else 0
    assert build.resources["key_tiles"].spill_stores <= most
    assert all("spill stores" in line for line in build.warnings)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "features", [ALL, Features(dropout=True), Features(mask=(2, 1, 4096, 4096))], ids=str
)
@pytest.mark.parametrize("dim", [192, 256])
def test_the_wide_backward_spills_little_with_features(dim, features):
    build = jit.build(make_plan(replace(backward(dim), features=features), H200).variant)
    assert build.resources["key_tiles"].spill_stores <= SPILLED_WITH_FEATURES
    assert all("spill stores" in line for line in build.warnings)


def test_which_calls_the_backward_takes():
    assert best_kernel(backward(), H200).name == BACKWARD
    assert best_kernel(backward(33, 127, causal=True, align_bytes=4), H200).name == BACKWARD
    assert best_kernel(backward(seqlen=2048, sink=True, dlse=True, packed=True), H200).name == BACKWARD
    assert best_kernel(backward(softcap=True, dropout=True, alibi=True), H200).name == BACKWARD
    assert best_kernel(backward(deterministic=True, window=(100, 0)), H200).name == BACKWARD
    bias = {"bias": (1, 1, 1024, 1024), "bias_dtype": "float32"}
    assert best_kernel(backward(**bias, mask=(1, 1, 1024, 1024)), H200).name == BACKWARD
    assert best_kernel(backward(**bias, gradients=("bias",)), H200).name == BACKWARD
    others = (
        *(backward(dim, array_sums=1, gradients=("score_mod",)) for dim in (128, 192)),
        backward(deterministic=True, mask=(1, 1, 1024, 1024)),
        *(backward(dim, seqlen=64) for dim in (128, 192)),
        replace(backward(seqlen=64, causal=True), seqlen_q=512),  # of which 64 see a key
        *(backward(dim, seqlen=128, tf32=True) for dim in (128, 192)),
    )
    for other in others:
        assert best_kernel(other, H200).name == "bwd_3_mma"
    for wide in (backward(136), backward(64, 256, deterministic=True), backward(256, tf32=True, causal=True)):
        assert best_kernel(wide, H200).name == WIDE
    assert best_kernel(backward(), Device.of("sm_100")).name == "bwd_3_mma"


@pytest.mark.parametrize(
    ("dim", "tf32", "blocks", "causal_blocks"),
    [
        (64, False, 29, 58),
        (128, False, 43, 87),
        (192, False, 29, 58),
        (128, True, 32, 65),
        (192, True, 43, 87),
    ],
)
def test_heads_that_share_few_keys_are_parted(dim, tf32, blocks, causal_blocks):
    """As long as eight heads give the mma.sync rungs enough parts."""
    name = WIDE if dim > 128 else BACKWARD
    for causal, most in ((False, blocks), (True, causal_blocks)):
        for count in (most, most + 1):
            call = replace(backward(dim, seqlen=64 * count, tf32=tf32, causal=causal), batch=1, kv_heads=1)
            parted = best_kernel(replace(call, heads=8), H200).name == "bwd_3_mma"
            assert parted == (count == most)
            assert best_kernel(replace(call, heads=2), H200).name == name


@pytest.mark.parametrize("dim", [128, 192])
def test_few_blocks_of_a_head_stand_in_line_if_some_are_longer(dim):
    """Of 132 SMs; the rest of a deterministic call's blocks may stand in line."""
    in_order = {"deterministic": True}
    for call, heads in (
        (backward(dim, **in_order), 1),
        (backward(dim, causal=True, **in_order), 33),
        (backward(dim, window=(100, None), **in_order), 33),
        (backward(dim, causal=True), 1),
    ):
        assert dict(make_plan(call, H200).macros)["LEAST_HEADS"] == heads


def test_gradients_of_scores_are_in_shared_memory_alone_beside_many_sums():
    macros = [dict(make_plan(backward(dim), H200, BACKWARD).macros) for dim in (64, 80, 96, 112)]
    assert [each["SHARES_GRADIENTS"] for each in macros] == [False, False, False, True]
    assert [each["PARTS_AHEAD"] for each in macros] == [True, False, False, False]


def test_other_tiles_of_the_backwards_are_refused():
    with pytest.raises(ValueError, match="block_m must be 64, as many"):
        make_plan(backward(), H200, BACKWARD, {"block_m": 32})
    with pytest.raises(ValueError, match="block_m must be 64 or 32"):
        make_plan(backward(256), H200, WIDE, {"block_m": 128})
    with pytest.raises(ValueError, match="block_n must be 64, the rows of a warpgroup's product"):
        make_plan(backward(256), H200, WIDE, {"block_n": 128})
