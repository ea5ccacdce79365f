"""`attention`, `attention_backward`, `softmax` and `plan`, as users call them.

Read top to bottom: arrays -> Problem -> Plan -> kernels, or the CPU. `cufa.call` holds the steps that these
functions share. `merge`, `quantize` and `rotary` are in `cufa.merging`, `cufa.quantizing` and `cufa.rotary`.
"""

from __future__ import annotations

import inspect
import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from cufa import arrays, cpu, launch, probabilities
from cufa.arguments import (
    DESCALES,
    FEATURE_ARRAYS,
    check_descales,
    check_dropout,
    check_flags,
    check_gradients,
    check_longest,
    check_range,
    check_scale,
    check_softcap,
    check_window,
    refuse_gpu_options,
)
from cufa.arrays import ArrayInfo
from cufa.call import (
    GRADIENT_ARRAYS,
    TENSORS,
    ArchLike,
    Arrays,
    Call,
    OptionValues,
    Tiles,
    Window,
    check_on_gpu,
    cpu_options,
    empty,
    facts_of,
    kernel_choice_of,
    plan_of,
    run_on_gpu,
    write_probabilities,
)
from cufa.device import target
from cufa.messages import kind_of, shown
from cufa.params import FeatureValues
from cufa.plan import Plan
from cufa.problem import (
    DTYPES,
    Direction,
    LayoutName,
    Precision,
    Problem,
    check_extents,
    dtype_name,
    dtype_of,
)
from cufa.score_mod import Mods, mods_of
from cufa.score_rules import Rules
from cufa.tensor_layout import contiguous_strides
from cufa.untraced import untraced


@untraced
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Window = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sink: Any = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqused_k: Any = None,
    block_table: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    precision: Precision = "ieee",
    layout: LayoutName = "bshd",
    return_lse: bool = False,
    return_attn_probs: bool = False,
    out: Any = None,
    lse: Any = None,
    workspace: Any = None,
    kernel: str | None = None,
    tiles: Tiles | None = None,
    arch: ArchLike | None = None,
    backend: arrays.Backend | None = None,
) -> Any:
    """Compute exact attention, softmax(softmax_scale * Q K^T) V, without a seqlen_q x seqlen_k matrix.

    The algorithm is FlashAttention-2 (Dao 2023, Algorithm 1). Sums are accumulated in float32, for float64
    arrays in float64. A row that sees no key has output 0 and LSE -inf (with a sink: the sink). A key that a
    row does not see never affects that row, even if the key is NaN.

    Arrays may come from NumPy, CuPy or any library with DLPack, but all from the same one. Any strides work;
    an array whose last axis is not contiguous is copied. GPU work runs on CuPy's current stream, without
    synchronization.

    A score is computed in this order: s = softmax_scale * q k; with a softcap, softcap * tanh(s / softcap);
    plus the bias; minus slope * |distance from the diagonal|; then `score_mod`. The diagonal ends in the
    bottom-right corner: query i is aligned with key i + seqlen_k - seqlen_q.

    `score_mod` and `mask_mod` are functions of your own, as in FlexAttention (Dong et al. 2024). They compute
    with Python's operators and NumPy's functions, with np.where instead of if. cufa calls them with symbols
    and compiles the result and its derivative into the kernel; on the CPU, NumPy evaluates them. To read
    arrays, pass `cufa.ScoreMod(function, *arrays)` or `cufa.MaskMod(function, *arrays)`. The function reads
    one element at a time, as in table[h, q_idx - kv_idx + 511]. On a GPU, indices are not checked, and
    negative ones do not count from the end. Any other value that the function takes from outside is a
    constant of the kernel: a new value compiles a new kernel. A ScoreMod or MaskMod is traced once. A bare
    function is traced in every call, which takes a fraction of a millisecond of host time.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16, bfloat16, float32 or float64; head_dim 1 to
            576. Or float8_e4m3fn (ml_dtypes), which has no gradients and, on a GPU, needs sm_89 or newer,
            even head dims, and no dropout_p.
        k: (batch, seqlen_k, kv_heads, head_dim), dtype as q. heads must be a multiple of kv_heads; query
            head h reads KV head h // (heads // kv_heads). With q in bfloat16 or float16, k and v may both
            be float8_e4m3fn: a key-value cache in half the memory, for few queries or, on a Hopper GPU with
            head dims over 256 and v in k, for any number.
        v: (batch, seqlen_k, kv_heads, value_dim), dtype as k; value_dim 1 to 512. It may be a view of the
            first columns of k, as in multi-head latent attention (DeepSeek-AI 2024, section 2.1) with
            absorbed projections; for few queries, or on a Hopper GPU with head dims over 256, they are then
            read once. If q, k and v are all float8_e4m3fn and there are many queries, a Hopper GPU is
            fastest with v stored transposed: a view of a (batch, kv_heads, value_dim, seqlen_k) array in
            which keys are adjacent and the other strides are multiples of 16, with head dims that are
            multiples of 16 and a multiple of 4 keys, neither packed nor in pages. Do not store v transposed
            for few queries, as in decoding, or for another GPU, which copies it in each call.
        causal: a query sees no key after the diagonal.
        window: (left, right): how many keys before and after the diagonal a query sees; None or -1 for all
            on that side. With `causal`, right is 0.
        softmax_scale: factor on Q K^T; 1 / sqrt(head_dim) if None.
        softcap: soft bound of the scores; 0 for none. In 8 or 16 bits at least 0.001.
        bias: added to the scores: (batch or 1, heads or 1, seqlen_q or 1, seqlen_k), float16, bfloat16,
            float32 or float64. Leading axes of length 1 may be left out. Unless q is float64, a float64 bias
            is rounded to float32; numpy.finfo(float).min then becomes -inf, which hides the key
            (but not NaN or infinity in its values, as a mask does). Hide keys by a mask or -inf, not by a
            large negative number: a row whose scores are all about -1e7 or less attends to its keys, and its
            LSE cannot hold the logarithm of their number, so its probabilities and gradients are too large.
        mask: True where a query sees a key: shaped like bias; bool, or uint8 with eight keys per byte, as
            from numpy.packbits(mask, axis=-1, bitorder="little"). On a GPU, kernels on tensor cores first
            read the mask once and then skip tiles in which no query sees a key, so masked calls take less
            time. They are fastest if rows of the mask are multiples of 16 bytes.
        alibi_slopes: (heads,) or (batch, heads), float32 (float64 for float64 arrays).
        sink: (heads,) float32 (float64 for float64 arrays): one more logit in the softmax of every row of
            a head, without a value. It is not scaled.
        score_mod: f(score, b, h, q_idx, kv_idx), or a `cufa.ScoreMod` of such a function and arrays. Returns
            the new score. score is a float; b is the sequence, h the query head; q_idx and kv_idx count
            queries and keys from the start of the sequence, wherever the diagonal is. Integers have 32 bits,
            or 64 after a constant that needs them or a number read from an int64 or uint32 array, and wrap
            around; floats are float32 (float64 for float64 arrays).
        mask_mod: g(b, h, q_idx, kv_idx), or a `cufa.MaskMod`. Returns True if the query sees the key, unless
            another mask hides it. On a GPU, tiles in which no query sees a key are skipped as with a mask.
        q_descale: (batch, kv_heads) float32, for float8_e4m3fn arrays only: the factor for q in all query
            heads that read this KV head; None for 1. `cufa.quantize` returns the array and its descale.
        k_descale: the same for k.
        v_descale: the same for v.
        dropout_p: fraction of the probabilities that is set to 0 at random, 0 <= dropout_p < 1, rounded to a
            multiple of 2**-15. The others are multiplied by 1 / (1 - dropout_p). The LSE is unaffected.
        seed: seed of dropout's random numbers, 64 bits (Philox4x32-7). By default it is the same in every
            call, so that a backward drops what its forward did; give each forward call another seed or
            offset, or all of them drop the same elements.
        offset: which random sequence of that seed to use, 32 bits; use a new one in every call.
        cu_seqlens_q: (batch + 1,) int32, for packed sequences: offsets, not lengths, where each sequence
            starts, and where the last ends. q and out are then (tokens, heads, head_dim); rows and keys of
            bias and mask are numbered within each sequence, and must suffice for the longest. Tokens before
            the first sequence and after the last are not written: in a new output they hold whatever was in
            memory. On a GPU the numbers are not checked.
        cu_seqlens_k: the same for k and v, (tokens, kv_heads, ...).
        seqused_k: (batch,) int32: how many keys of each sequence count, all if it has fewer. The diagonal
            ends at the last key that counts. On a GPU numbers are not checked; below 0, all count.
        block_table: (batch, pages) int32, for keys and values in pages (Kwon et al. 2023). k is then
            (pages, page_size, kv_heads, head_dim), v likewise; key i of sequence b is row i % page_size of
            page block_table[b, i // page_size]. Pages may have any order and any size. Entries and rows
            beyond the `seqused_k` keys of a sequence are not read; entries of pages that a window hides may
            be. May be combined with cu_seqlens_q, not with cu_seqlens_k. There are no gradients. On a GPU the
            numbers are not checked.
        max_seqlen_q: the most queries that a sequence of cu_seqlens_q has, if you know it. Only planning
            uses it, for tiles that suit the lengths. No result depends on it.
        max_seqlen_k: the same for the keys of cu_seqlens_k, by which the backward is planned.
        precision: of float32 products: "ieee" for the error of float32, or the faster "tf32": tensor cores
            round operands to 10 bits of mantissa. No effect on the CPU or with return_attn_probs.
        layout: "bshd" as above, or "bhsd" for (batch, heads, seqlen, head_dim); pages are then
            (pages, kv_heads, page_size, head_dim).
        return_lse: also return the log-sum-exp of the scores (LSE), which the backward needs.
        return_attn_probs: also return the LSE and the probabilities that v is multiplied by, in
            (batch, heads, seqlen_q, seqlen_k) and q's dtype. With dropout, dropped ones are 0 and the others
            scaled up. They take the O(N^2) memory that attention avoids; a log message says how much. Not
            for packed sequences or 8-bit keys.
        out: where to write the output, with its shape and dtype; must not overlap an input. For q in
            float8_e4m3fn it may be float16.
        lse: where to write the LSE, which is then also returned.
        workspace: scratch memory for the kernel, `cufa.plan(...).workspace_bytes` bytes: a contiguous array
            on the GPU, from CuPy or with DLPack. If None, it comes from CuPy's pool and returns there, so a
            call that is captured into a CUDA graph needs one, or a pool of its own (examples/graph.py).
        kernel: a rung of the ladder instead of the fastest (`cufa kernels` lists them; "fwd_4" suffices).
        tiles: sizes of that kernel's tiles, as in {"block_m": 64}; the plan chooses the others to suit.
        arch: the architecture to compile for instead of this GPU's, as in "compute_80"; also CUFA_ARCH.
        backend: "cuda" or "numpy". None: the GPU if the arrays are on one or one is available.

    Returns:
        (batch, seqlen_q, heads, value_dim) in the given layout, in q's dtype (bfloat16 for float8_e4m3fn),
        from the library of q. With return_lse, a pair of the output and the LSE: (batch, heads, seqlen_q),
        for packed sequences (heads, tokens), natural logarithm, float32 (float64 for float64 arrays). With
        return_attn_probs, a triple of output, LSE and probabilities.

    Raises:
        TypeError: an argument that is not an array, mixed libraries or dtypes, an unsupported dtype, or a
            function that cannot be traced.
        ValueError: shapes that do not match, an `out` that does not fit or overlaps an input, an option
            with an impossible value, a kernel that cannot run here, arrays on another GPU.
        IndexError: on the CPU, a function that reads outside an array. Outputs that were passed in may by
            then be partly written.
        GPUUnavailableError: "cuda" without a GPU or CuPy; the message says what to install.
        NVRTCMissingError: a GPU without NVRTC; the message says what to install.
        LaunchError, CompileError: the driver or NVRTC refused the kernel.
    """
    # A call of a check takes longer than to see that there is nothing to check, as in most calls.
    if not ((return_lse is True or return_lse is False) and return_attn_probs is False):
        check_flags(return_lse=return_lse, return_attn_probs=return_attn_probs)
    if not (q_descale is k_descale is v_descale is None):
        check_descales(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    values = _feature_values(softcap, dropout_p, seed, offset)
    mods = mods_of(score_mod, mask_mod)
    longest = max_seqlen_q, max_seqlen_k
    option_values = _option_values(causal, window, values, layout, precision, mods, longest)
    optional = {
        "bias": bias,
        "mask": mask,
        "alibi_slopes": alibi_slopes,
        "sink": sink,
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "seqused_k": seqused_k,
        "block_table": block_table,
        "out": out,
        "lse": lse,
    }
    call = Call(
        "forward", {"q": q, "k": k, "v": v, **mods.arrays, **_given(optional)}, option_values, backend
    )
    scale = _scale_of(call.problem, softmax_scale, values)
    call.want("out")
    if return_lse or return_attn_probs or lse is not None:
        call.want("lse")
    if return_attn_probs:
        call.refine()
        call.wanted["probs"] = probabilities.shape(call.problem), DTYPES[call.problem.dtype]

    if call.on_gpu:
        chosen = kernel_choice_of("forward", kernel, tiles, arch)
        run_on_gpu(call, TENSORS["forward"], None, scale, values, workspace, chosen)
    else:
        refuse_gpu_options(kernel=kernel, tiles=tiles, arch=arch, workspace=workspace)
        call.allocate()
        tensors = call.in_bshd("q", "k", "v", "out")
        q, k, v, output = tensors
        descales = {name: call.tensors[name] for name in DESCALES if name in call.tensors}
        options = cpu_options(call, scale, values, mods)
        cpu.attention(q, k, v, output, call.tensors.get("lse"), **descales, **options)
    result = call.give_back("out", out)
    if return_attn_probs:
        write_probabilities(call, scale, values, mods, arch)
        return result, call.give_back("lse", lse), call.give_back("probs", None)
    return (result, call.give_back("lse", lse)) if return_lse or lse is not None else result


def check_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool,
    window: Window,
    softmax_scale: float | None,
    softcap: float,
    return_lse: bool,
    **side: Any,
) -> None:
    """Raise what `attention` would raise for these arrays and options, without computing anything.

    Arrays on the CPU stay there, even if `attention` would copy them to a GPU; then only the plan is made.
    `side` are further arrays of `attention`, or None, in its order, so that both calls share cached checks.
    """
    check_flags(return_lse=return_lse)
    check_descales(**{name: side.get(name) for name in DESCALES})
    values = _feature_values(softcap, 0.0, 0, 0)
    option_values = _option_values(causal, window, values, "bshd", "ieee", mods_of(None, None))
    adopted = arrays.adopt_in_place({"q": q, "k": k, "v": v} | _given(side))
    facts = facts_of("forward", adopted.described, option_values)
    scale = _scale_of(facts.problem, softmax_scale, values)
    if adopted.on_gpu:
        check_on_gpu(facts, adopted.addresses)
        return
    own = adopted.arrays
    of_scores = {name: own[name] for name in FEATURE_ARRAYS if name in own}
    Rules(softmax_scale=scale, **of_scores).sequences(own["q"], own["k"])
    if arrays.gpu_usable():
        plan_of(facts, {}, False, target(None))


@untraced
def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    causal: bool = False,
    window: Window = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sink: Any = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqused_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    precision: Precision = "ieee",
    deterministic: bool = False,
    return_dbias: bool = False,
    return_dsink: bool = False,
    return_dscore_mod: bool = False,
    layout: LayoutName = "bshd",
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dbias: Any = None,
    dsink: Any = None,
    dscore_mod: Sequence[Any] | None = None,
    workspace: Any = None,
    kernel: str | None = None,
    tiles: Tiles | None = None,
    arch: ArchLike | None = None,
    backend: arrays.Backend | None = None,
) -> tuple[Any, ...]:
    """Compute the gradients of `attention`: of q, k and v, and on request of bias, sink and score_mod arrays.

    The algorithm is FlashAttention-2 (Dao 2023, Algorithm 2): probabilities are recomputed in tiles from q,
    k and lse. Rows that see no key, and keys that no row sees, have gradient 0.

    Args:
        dout: gradient of the output: (batch, seqlen_q, heads, value_dim), from q's library, in q's dtype.
        q: as in the forward call; likewise k and v, and all options that are not described here.
        k: as above.
        v: as above.
        out: the output of `attention`.
        lse: the LSE that `attention` returned with return_lse=True, (batch, heads, seqlen_q). A row whose
            LSE is -inf counts as one that sees no key.
        dlse: gradient of the LSE, with its shape and dtype; None for 0.
        causal: as in the forward call; likewise the options below.
        window: as in the forward call.
        softmax_scale: as in the forward call.
        softcap: as in the forward call.
        bias: as in the forward call.
        mask: as in the forward call.
        alibi_slopes: as in the forward call.
        sink: as in the forward call.
        score_mod: as in the forward call.
        mask_mod: as in the forward call.
        dropout_p: as in the forward call.
        seed: as in the forward call: the same probabilities are dropped.
        offset: as in the forward call.
        cu_seqlens_q: as in the forward call; gradients of tokens outside all sequences are not written.
        cu_seqlens_k: as in the forward call.
        seqused_k: as in the forward call; keys beyond it have gradient 0.
        max_seqlen_q: as in the forward call, which alone is planned by it.
        max_seqlen_k: the most keys that a sequence of cu_seqlens_k has, if you know it. Only planning uses
            it: if they are few, a block has a whole sequence. No result depends on it.
        precision: as in `attention`; it may differ from the forward call's.
        deterministic: the same bits in every run; slower on a GPU. On the CPU, always so, but with another
            number of threads all gradients except dq may have other bits.
        return_dbias: also return the gradient of the bias.
        return_dsink: also return the gradient of the sink.
        return_dscore_mod: also return the gradients of the arrays that score_mod, a `cufa.ScoreMod`, reads.
            Not with `deterministic` on a GPU, where these gradients are summed in no fixed order.
        layout: as in the forward call.
        dq: where to write the gradient of q, with its shape and dtype; must not overlap an input.
        dk: the same for k.
        dv: the same for v.
        dbias: the same for the bias; it is then also returned.
        dsink: the same for the sink.
        dscore_mod: the same for the arrays of score_mod: a tuple as it is returned, in which None stands for
            an array to allocate, too.
        workspace: scratch memory for the kernels, `cufa.plan(..., backward=True).workspace_bytes` bytes.
        kernel: a backward rung of the ladder instead of the fastest.
        tiles: sizes of that kernel's tiles, as in `attention`.
        arch: the architecture to compile for instead of this GPU's.
        backend: "cuda", "numpy" or None.

    Returns:
        (dq, dk, dv), each with the shape, dtype and library of q, k, v. dk and dv are summed over the query
        heads that share a KV head. If requested, then dbias, shaped like bias and summed over broadcast axes;
        then dsink, shaped like sink and summed over batch and rows; then, with return_dscore_mod, a tuple
        with one gradient per array of the ScoreMod, shaped like it and summed over all scores that read an
        element, or None for arrays of integers and bools.

    Raises:
        What `attention` raises.
    """
    check_flags(return_dbias=return_dbias, return_dsink=return_dsink, return_dscore_mod=return_dscore_mod)
    values = _feature_values(softcap, dropout_p, seed, offset)
    gradients = {"dq": dq, "dk": dk, "dv": dv}
    of_features: tuple[str, ...] = ()
    if return_dbias or dbias is not None:
        gradients["dbias"] = dbias
        of_features += ("bias",)
    if return_dsink or dsink is not None:
        gradients["dsink"] = dsink
        of_features += ("sink",)
    mods = mods_of(score_mod, mask_mod)
    of_arrays: list[tuple[str | None, Any]] = []
    if return_dscore_mod or dscore_mod is not None:
        of_features += ("score_mod",)
        of_arrays = mods.array_gradients(dscore_mod)
    named_of_arrays = {name: output for name, output in of_arrays if name is not None}
    longest = max_seqlen_q, max_seqlen_k
    option_values = _option_values(
        causal, window, values, layout, precision, mods, longest, deterministic, of_features
    )
    required = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": lse}
    optional = {
        "dlse": dlse,
        "bias": bias,
        "mask": mask,
        "alibi_slopes": alibi_slopes,
        "sink": sink,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "seqused_k": seqused_k,
        **mods.arrays,
        **gradients,
        **named_of_arrays,
    }
    call = Call("backward", required | _given(optional), option_values, backend)
    scale = _scale_of(call.problem, softmax_scale, values)
    for name in (*gradients, *named_of_arrays):
        call.want(name)

    if call.on_gpu:
        chosen = kernel_choice_of("backward", kernel, tiles, arch)
        run_on_gpu(call, TENSORS["backward"], None, scale, values, workspace, chosen)
    else:
        refuse_gpu_options(kernel=kernel, tiles=tiles, arch=arch, workspace=workspace)
        call.allocate()
        tensors = call.in_bshd("dout", "q", "k", "v", "out")
        written = call.in_bshd("dq", "dk", "dv")
        optional = {name: call.tensors[name] for name in GRADIENT_ARRAYS if name in call.tensors}
        side = cpu_options(call, scale, values, mods) | optional
        sums = {name[1:]: call.tensors[name] for name in named_of_arrays}
        cpu.attention_backward(*(*tensors, call.tensors["lse"], *written), dscore_mod=sums, **side)
    results = tuple([call.give_back(name, given) for name, given in gradients.items()])
    if "score_mod" not in of_features:
        return results
    return *results, tuple([name and call.give_back(name, output) for name, output in of_arrays])


@untraced
def softmax(
    x: Any,
    *,
    passes: Literal[2, 3] = 2,
    arch: ArchLike | None = None,
    backend: arrays.Backend | None = None,
) -> Any:
    """Compute the softmax over the last axis, as standard attention does between its two products.

    Args:
        x: any shape with at least one axis, float16, bfloat16, float32 or float64; NumPy, CuPy or DLPack.
        passes: reads of each row: 3 for safe softmax (maximum, sum, quotients), 2 for online softmax
            (Milakov and Gimelshein 2018, Algorithm 3), which computes maximum and sum together.
        arch: the architecture to compile for instead of this GPU's.
        backend: "cuda", "numpy" or None, as in `attention`.

    Returns:
        An array with the shape, dtype and library of x. A row of only -inf gives zeros.

    Raises:
        TypeError: not an array, or an unsupported dtype.
        ValueError: no axis, another number of passes, an array on another GPU.
        GPUUnavailableError, NVRTCMissingError, LaunchError, CompileError: as `attention`.
    """
    if not isinstance(passes, (int, np.integer)) or passes not in (2, 3):
        raise ValueError(f"passes is {shown(passes)}; it may be 2 or 3")
    adopted = arrays.adopt({"x": x}, backend)
    source = adopted.arrays["x"]
    dtype = dtype_name(source.dtype, "x")
    if source.ndim == 0:
        raise ValueError("x has shape (); it must have at least one axis")
    check_extents("x", source.shape)
    arrays.check_aligned(adopted)
    result = empty(source.shape, DTYPES[dtype], adopted.on_gpu)
    if adopted.on_gpu:
        if result.size:
            rows = (math.prod(source.shape[:-1]), source.shape[-1])
            matrix = sys.modules["cupy"].ascontiguousarray(source.reshape(rows))
            launch.softmax(matrix, result.reshape(rows), dtype, passes, arch)
    else:
        refuse_gpu_options(arch=arch)
        cpu.softmax(source, result, passes)
    return adopted.give_back(result)


@untraced
def plan(
    q: Any,
    k: Any,
    v: Any,
    *,
    backward: bool = False,
    causal: bool = False,
    window: Window = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    deterministic: bool = False,
    gradients: tuple[str, ...] = (),
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    precision: Precision = "ieee",
    layout: LayoutName = "bshd",
    kernel: str | None = None,
    tiles: Tiles | None = None,
    arch: ArchLike | None = None,
    **side: Any,
) -> Plan:
    """Return the Plan that a call with these arrays would use on the GPU, and why. Compiles and runs nothing.

    Args:
        q: anything with the shape and dtype of an array; likewise k and v. Without strides, it counts as
            contiguous; unless it is CuPy's, as well aligned as its strides allow.
        k: as above.
        v: as above. If k and v are arrays of NumPy or CuPy, their addresses say whether v is a view of the
            first columns of k.
        backward: plan `attention_backward` instead of `attention`.
        causal: as in `attention`; likewise the options below.
        window: as in `attention`.
        softmax_scale: as in `attention`; the plan does not depend on it.
        softcap: as in `attention`.
        score_mod: as in `attention`; likewise mask_mod.
        mask_mod: as above.
        dropout_p: as in `attention`; likewise seed and offset, which the plan does not depend on.
        seed: as above.
        offset: as above.
        deterministic: as in `attention_backward`; with `backward` only.
        gradients: inputs whose gradients are also requested: "bias", "sink", or "score_mod" for the arrays
            that it reads; with `backward` only.
        max_seqlen_q: as in `attention`.
        max_seqlen_k: as in `attention`.
        precision: as in `attention`.
        layout: as in `attention`.
        kernel: as in `attention`.
        tiles: as in `attention`.
        arch: the architecture to plan for, on any machine. Without a GPU, it or CUFA_ARCH is required.
        side: the other arrays of `attention` and `attention_backward` by name: bias, mask, alibi_slopes,
            sink, q_descale, k_descale, v_descale, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, dlse;
            described like q.

    Returns:
        The Plan; print it to read it.

    Raises:
        TypeError, ValueError: as `attention`; also for an option of the backward without `backward`.
        GPUUnavailableError: no GPU and no arch.
    """
    unknown = side.keys() - {*FEATURE_ARRAYS, *DESCALES, "dlse"}
    if unknown:
        own = [name for name in inspect.signature(plan).parameters if name != "side"]
        allowed = ", ".join((*own, *FEATURE_ARRAYS, *DESCALES, "dlse"))
        raise TypeError(
            f"plan() has no {', '.join(sorted(unknown))}; it has {allowed}; `gradients` names those beyond "
            "q, k and v"
        )
    check_flags(backward=backward, deterministic=deterministic)
    check_gradients(gradients)
    if not backward:
        has_dlse = side.get("dlse") is not None
        refused = {"deterministic": deterministic, "gradients": gradients, "dlse": has_dlse}
        given = ", ".join(name for name, value in refused.items() if value)
        if given:
            raise ValueError(f"{given}: only for gradients, which are planned with backward=True")
    direction: Direction = "backward" if backward else "forward"
    mods = mods_of(score_mod, mask_mod)
    named = {"q": q, "k": k, "v": v} | _given(side) | mods.arrays
    described = tuple(_described(name, array) for name, array in named.items())
    values = _feature_values(softcap, dropout_p, seed, offset)
    longest = max_seqlen_q, max_seqlen_k
    option_values = _option_values(
        causal, window, values, layout, precision, mods, longest, deterministic, gradients
    )
    facts = facts_of(direction, described, option_values)
    _scale_of(facts.problem, softmax_scale, values)
    device = target(arch, for_plan_only=True)
    return plan_of(facts, arrays.addresses_on_gpu(named), arrays.values_in_keys(k, v), device, kernel, tiles)


def _described(name: str, array: Any) -> ArrayInfo:
    """Describe anything with a shape and a dtype, even if it is not an array.

    Without strides (in bytes), it counts as contiguous.
    """
    if not (hasattr(array, "shape") and hasattr(array, "dtype")):
        raise TypeError(f"{name} is {kind_of(array)}; it must have a shape and a dtype")
    try:
        shape, dtype = tuple(map(operator.index, array.shape)), dtype_of(array)
    except TypeError as error:
        raise TypeError(f"{name} has shape {array.shape} and dtype {array.dtype}: {error}") from None
    if min(shape, default=0) < 0:
        raise ValueError(f"{name} has shape {shape}; no axis may be negative")
    strides = getattr(array, "strides", None)
    if strides is None:
        return name, shape, contiguous_strides(shape, dtype.itemsize), dtype
    wanted = f"{name} has strides {shown(strides)}; with shape {shape} it must have {len(shape)} integers"
    try:
        strides = tuple(map(operator.index, strides))
    except TypeError:
        raise TypeError(wanted) from None
    if len(strides) != len(shape):
        raise ValueError(wanted)
    return name, shape, strides, dtype


_NO_VALUES = FeatureValues()


def _given(named: Arrays) -> Arrays:
    return {name: array for name, array in named.items() if array is not None}


def _feature_values(softcap: float, dropout_p: float, seed: int, offset: int) -> FeatureValues:
    numbers = type(softcap) in (int, float) and type(dropout_p) in (int, float)
    if numbers and type(seed) is type(offset) is int and softcap == dropout_p == seed == offset == 0:
        return _NO_VALUES
    return FeatureValues(check_softcap(softcap), *check_dropout(dropout_p, seed, offset))


def _scale_of(problem: Problem, softmax_scale: float | None, values: FeatureValues) -> float:
    scale = check_scale(softmax_scale, problem.head_dim)
    if softmax_scale is not None or values.softcap:
        check_range(problem, scale, values.softcap)
    return scale


def _option_values(
    causal: bool,
    window: Window,
    values: FeatureValues,
    layout: str,
    precision: str,
    mods: Mods,
    longest: tuple[int | None, int | None] = (None, None),
    deterministic: bool = False,
    gradients: tuple[str, ...] = (),
) -> OptionValues:
    """The options that a kernel is planned for. Of softcap and dropout, only whether they are on.

    They are part of a cache's key, in which 1.0 equals 1. Options that may be 1 but not 1.0 are checked here.
    """
    # As in `attention`, checks are only called if there is something to check.
    if not ((causal is True or causal is False) and (deterministic is True or deterministic is False)):
        check_flags(causal=causal, deterministic=deterministic)
    if window is not None:
        window = check_window(window)
    if not (longest[0] is longest[1] is None):
        longest = check_longest("max_seqlen_q", longest[0]), check_longest("max_seqlen_k", longest[1])
    return (
        causal,
        window,
        values.softcap > 0,
        values.dropout_p > 0,
        deterministic,
        gradients,
        layout,
        precision,
        *(mods.written_with_gradients if "score_mod" in gradients else mods.written),
        *longest,
    )
