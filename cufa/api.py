"""The functions that users call, read top to bottom: arrays -> Problem -> Plan -> kernels, or the CPU."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from cufa import arrays, cpu, launch, probabilities
from cufa.arrays import Described
from cufa.device import Arch, target
from cufa.launch import FeatureValues
from cufa.plan import Plan, check_tiles, make_plan, make_probabilities_plan
from cufa.problem import (
    DTYPES,
    FLOAT8,
    PLAIN,
    Axes,
    Direction,
    LayoutName,
    Options,
    Precision,
    Problem,
    Shape,
    check_dropout,
    check_fits,
    check_layout,
    check_options,
    check_scale,
    check_softcap,
    dtype_name,
    lse_shape,
    make_problem,
    output_shape,
    tensor_axes,
)
from cufa.score_mod import Mods, Written, mods_of
from cufa.tensor_layout import (
    Layout,
    Region,
    Storage,
    alignment,
    check_apart,
    contiguous_strides,
    is_contiguous,
    layout_of,
)

Tiles = Mapping[str, int]
Window = tuple[int | None, int | None] | None
ArchLike = Arch | str | int
Arrays = dict[str, Any]


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
    """Exact attention, softmax(softmax_scale * Q K^T) V, never holding a seqlen_q x seqlen_k matrix.

    Computed as in FlashAttention-2 (Dao 2023, Algorithm 1). Sums are kept in float32, for float64 arrays
    in float64. A row that sees no key has output 0 and LSE -inf (with a sink: the sink). What a row does
    not see has no part in its result, not even if it is NaN.

    Arrays are NumPy's, CuPy's or any with DLPack, all of one kind, with any strides; one whose last axis
    is not contiguous is copied. On a GPU the work is on CuPy's current stream, and nothing waits for it.

    A score is s = softmax_scale * q k; then s = softcap * tanh(s / softcap), if there is a softcap; then
    the bias and -slope * |distance from the diagonal| are added; then it is what `score_mod` makes of it. The
    diagonal ends in the bottom-right corner: query i stands at key i + seqlen_k - seqlen_q.

    `score_mod` and `mask_mod` are functions of one's own, as FlexAttention has them (Dong et al. 2024). They
    compute with numbers, by Python's operators and NumPy's functions; np.where stands for if. They are called
    with symbols; what they compute, and its derivative, is compiled into the kernel, and on the CPU NumPy
    computes it. A function that reads arrays is given them as
    `cufa.ScoreMod(function, *arrays)` and `cufa.MaskMod(function, *arrays)`, and reads an element at a time,
    as in table[h, q_idx - kv_idx]. On a GPU nobody checks that an index lies in the array, and one from its
    end does not. What else such a function takes from around it is a constant of the kernel, which another
    value compiles anew. One of these objects is traced once, a function by itself in every call, which takes
    the host a fraction of a millisecond.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16, bfloat16, float32 or float64; head_dim 1 to 512
            (256 if gradients are wanted). Or float8_e4m3fn (ml_dtypes), of which there are no gradients; on
            a GPU that takes one of sm_90 and head dims to 256.
        k: (batch, seqlen_k, kv_heads, head_dim), as q; heads must be a multiple of kv_heads, and query
            head h reads KV head h // (heads // kv_heads).
        v: (batch, seqlen_k, kv_heads, value_dim), as q; value_dim 1 to 512.
        causal: a query sees no key after the diagonal.
        window: (left, right): how many keys before and after the diagonal a query sees; None or -1 on a
            side is all of them. With `causal` right is 0.
        softmax_scale: factor on Q K^T; 1 / sqrt(head_dim) if None.
        softcap: what scores are bounded by, softly; 0 for no bound.
        bias: added to the scores: (batch or 1, heads or 1, seqlen_q or 1, seqlen_k), without the first
            axes that are 1 if you like; any of the dtypes.
        mask: which keys a query sees, True to see it: shaped as bias; bool, or uint8 with eight keys in a
            byte as from numpy.packbits(mask, axis=-1, bitorder="little"). On a GPU the mma kernels read it
            once beforehand and leave out tiles of which no query sees a key, so time follows what is seen;
            they are fastest if its rows are multiples of 16 bytes.
        alibi_slopes: (heads,) or (batch, heads), float32 (float64 for float64 arrays).
        sink: (heads,) float32 (float64 for float64 arrays): one more logit in the softmax of every row of
            a head, with no value; it is not scaled.
        score_mod: f(score, b, h, q_idx, kv_idx), or a `cufa.ScoreMod` of it and arrays: returns the new score
            of a float; of sequence b's and query head h's integers q_idx and kv_idx, which count queries
            and keys from the sequence's own first ones, wherever the diagonal is. Integers have 32 bits
            unless they are of an array of int64 or uint32; floats are float32 (float64 for float64 arrays).
        mask_mod: g(b, h, q_idx, kv_idx), or a `cufa.MaskMod`: returns True for a key that the query sees, if
            no other mask hides it. On a GPU the mma kernels leave out what no query of a tile sees.
        q_descale: (batch, kv_heads) float32, for float8_e4m3fn arrays only: what q is to be multiplied with,
            for the query heads that read a KV head; None for 1.
        k_descale: the same for k.
        v_descale: the same for v.
        dropout_p: which part of the probabilities is set to 0 at random, 0 <= dropout_p < 1; the others
            grow by 1 / (1 - dropout_p). The LSE knows nothing of it.
        seed: of dropout's random numbers, 64 bits (Philox4x32-10).
        offset: which of that seed's sequences of random numbers, 32 bits; another for every call.
        cu_seqlens_q: (batch + 1,) int32, where each sequence begins and the last ends, for sequences packed
            one after the other: q is then (tokens, heads, head_dim), and likewise out; bias and mask have
            rows and keys numbered within each sequence, and must reach as far as the longest. Tokens before
            the first sequence and after the last are of none: nothing is written for them, so that in a new
            output they are whatever was in its memory. On a GPU the numbers are not checked.
        cu_seqlens_k: the same for k and v, (tokens, kv_heads, ...).
        seqused_k: (batch,) int32: only so many keys of each sequence count; the last one seen is the
            diagonal's end.
        block_table: (batch, pages) int32, for keys and values that lie in pages (Kwon et al. 2023): k is then
            (pages, page_size, kv_heads, head_dim), v likewise, and key i of sequence b is row i % page_size
            of page block_table[b, i // page_size]. Which pages are a sequence's, and in what order, does not
            matter, nor does the page size. Entries past the `seqused_k` keys of a sequence are not read, nor
            are rows past them. With cu_seqlens_q, but not with cu_seqlens_k or descales. There are no
            gradients. On a GPU the numbers are not checked.
        precision: of float32 products: "ieee" for the error of float32, or "tf32", which is faster: tensor
            cores round their operands to 10 bits of mantissa. On the CPU there is no difference.
        layout: "bshd" as above, or "bhsd" for (batch, heads, seqlen, head_dim); pages are then
            (pages, kv_heads, page_size, head_dim).
        return_lse: also return the log-sum-exp of the scores, which the backward needs.
        return_attn_probs: also return the LSE and the probabilities, (batch, heads, seqlen_q, seqlen_k) of
            q's dtype, as they were multiplied with v: with dropout, those that are dropped are 0 and the
            others have grown. They take the memory that attention does without; a log says how much. Not of
            packed sequences.
        out: where to write the output, of its shape and dtype; must not overlap an input. For
            float8_e4m3fn arrays it may be float16.
        lse: where to write the LSE, which is then returned too.
        workspace: memory for the kernel, `cufa.plan(...).workspace_bytes` of it: an array of CuPy's or with
            DLPack, contiguous, on the GPU.
        kernel: a rung of the ladder (`cufa kernels` lists them) instead of the fastest.
        tiles: overrides of that kernel's tile sizes, as in {"block_m": 64}.
        arch: what to compile for instead of this GPU's own, as in "compute_80"; also CUFA_ARCH.
        backend: "cuda" or "numpy"; None is the GPU if the arrays are on one or there is one.

    Returns:
        (batch, seqlen_q, heads, value_dim) in the layout asked for, of the dtype and kind of q (for
        float8_e4m3fn of bfloat16). With return_lse, a pair of that and the LSE: (batch, heads, seqlen_q), of
        packed sequences (heads, tokens), natural logarithm, float32 (float64 for float64 arrays). With
        return_attn_probs, these two and the probabilities.

    Raises:
        TypeError: no array, kinds or dtypes mixed, or a dtype that is not supported; a function that cannot
            be traced.
        ValueError: shapes that don't go together, an `out` that does not fit or overlaps an input, an
            option with an impossible value, a kernel that cannot run here, arrays on another GPU.
        GPUUnavailableError: "cuda" without a GPU or CuPy; the message says what to install.
        LaunchError, CompileError: the driver or NVRTC refused the kernel.
    """
    values = _feature_values(softcap, dropout_p, seed, offset)
    mods = mods_of(score_mod, mask_mod)
    asked = _asked(causal, window, values, layout, precision, mods)
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
        **mods.arrays,
        "out": out,
        "lse": lse,
    }
    call = _Call("forward", {"q": q, "k": k, "v": v} | _given(optional), asked, backend)
    scale = check_scale(softmax_scale, call.problem.head_dim)
    call.want("out")
    if return_lse or return_attn_probs or lse is not None:
        call.want("lse")
    if return_attn_probs:
        call.wanted["probs"] = probabilities.shape(call.problem), DTYPES[call.problem.dtype]

    if call.on_gpu:
        rung = _rung(kernel, tiles, arch)
        _run_on_gpu(call, _TENSORS["forward"], call.known.layout, scale, values, workspace, rung)
    else:
        _refuse_gpu_options(kernel=kernel, tiles=tiles, arch=arch, workspace=workspace)
        call.allocate()
        tensors = call.in_bshd("q", "k", "v", "out")
        q, k, v, output = tensors
        if call.problem.dtype == FLOAT8:
            q, k, v = _descaled(call, q=q, k=k, v=v)
        cpu.attention(q, k, v, output, call.tensors.get("lse"), **_cpu_options(call, scale, values, mods))
    result = call.give_back("out", out)
    if return_attn_probs:
        _write_probabilities(call, scale, values, mods, arch)
        return result, call.give_back("lse", lse), call.give_back("probs", None)
    return (result, call.give_back("lse", lse)) if return_lse or lse is not None else result


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
    workspace: Any = None,
    kernel: str | None = None,
    tiles: Tiles | None = None,
    arch: ArchLike | None = None,
    backend: arrays.Backend | None = None,
) -> tuple[Any, ...]:
    """The gradients of `attention` in q, k and v, and in bias, sink and a score_mod's arrays if asked for.

    Computed as in FlashAttention-2 (Dao 2023, Algorithm 2): the probabilities are recomputed from q, k
    and lse, never held as a whole. Rows that see no key, and keys that no row sees, have gradient 0.

    Args:
        dout: gradient of the output: (batch, seqlen_q, heads, value_dim), of q's dtype and kind.
        q: as it was given to `attention`; likewise k and v, and all options that are not named here.
        k: as above.
        v: as above.
        out: what `attention` returned.
        lse: what `attention` returned with return_lse=True, (batch, heads, seqlen_q).
        dlse: gradient of the LSE, of its shape and dtype; None for 0.
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
        cu_seqlens_q: as in the forward call.
        cu_seqlens_k: as in the forward call.
        seqused_k: as in the forward call; keys beyond it have gradient 0.
        precision: as in `attention`; it need not be that of the forward call.
        deterministic: the same bits in every run; on a GPU that takes longer.
        return_dbias: also return the gradient of the bias.
        return_dsink: also return the gradient of the sink.
        return_dscore_mod: also return the gradients of the arrays that score_mod, a `cufa.ScoreMod`, reads.
            On a GPU scores add to them in no order, so that there are none with `deterministic`.
        layout: as in the forward call.
        dq: where to write the gradient of q, of its shape and dtype; must not overlap an input.
        dk: the same for k.
        dv: the same for v.
        dbias: the same for the bias, contiguous; it is then returned too.
        dsink: the same for the sink.
        workspace: memory for the kernels, `cufa.plan(..., backward=True).workspace_bytes` of it.
        kernel: a backward rung of the ladder instead of the fastest.
        tiles: overrides of that kernel's tile sizes.
        arch: what to compile for instead of this GPU's own.
        backend: "cuda", "numpy" or None.

    Returns:
        (dq, dk, dv), each of the shape, dtype and kind of q, k, v; dk and dv are summed over the query
        heads that share a KV head. Then dbias if it is asked for, of bias's shape and dtype, summed over
        the axes that were broadcast; then dsink, likewise, summed over batch and rows. Then, with
        return_dscore_mod, a tuple with a gradient for each array of the ScoreMod, of its shape and dtype and
        summed over the scores that read an element; None for arrays of integers and bools.

    Raises:
        What `attention` raises.
    """
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
    of_arrays: tuple[str | None, ...] = ()
    if return_dscore_mod:
        of_features += ("score_mod",)
        of_arrays = mods.array_gradients
    asked = _asked(causal, window, values, layout, precision, mods, deterministic, of_features)
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
    }
    call = _Call("backward", required | _given(optional), asked, backend)
    scale = check_scale(softmax_scale, call.problem.head_dim)
    for name in (*gradients, *filter(None, of_arrays)):
        call.want(name)

    if call.on_gpu:
        rung = _rung(kernel, tiles, arch)
        _run_on_gpu(call, _TENSORS["backward"], call.known.layout, scale, values, workspace, rung)
    else:
        _refuse_gpu_options(kernel=kernel, tiles=tiles, arch=arch, workspace=workspace)
        call.allocate()
        tensors = call.in_bshd("dout", "q", "k", "v", "out")
        written = call.in_bshd("dq", "dk", "dv")
        optional = {name: call.tensors[name] for name in _GRADIENT_ARRAYS if name in call.tensors}
        cpu_options = _cpu_options(call, scale, values, mods) | optional
        dscore_mod = {name[1:]: call.tensors[name] for name in filter(None, of_arrays)}
        cpu.attention_backward(
            *(*tensors, call.tensors["lse"], *written), dscore_mod=dscore_mod, **cpu_options
        )
    results = tuple([call.give_back(name, given) for name, given in gradients.items()])
    if not return_dscore_mod:
        return results
    return *results, tuple([name and call.give_back(name, None) for name in of_arrays])


def softmax(
    x: Any,
    *,
    passes: Literal[2, 3] = 2,
    arch: ArchLike | None = None,
    backend: arrays.Backend | None = None,
) -> Any:
    """Softmax over the last axis, the part of standard attention between its two products.

    Args:
        x: any shape with at least one axis, float16, bfloat16, float32 or float64; NumPy, CuPy or DLPack.
        passes: reads of each row: 3 for the safe softmax (maximum, sum, quotients), 2 for the online one
            (Milakov and Gimelshein 2018, Algorithm 3), which finds maximum and sum together.
        arch: what to compile for instead of this GPU's own.
        backend: "cuda", "numpy" or None, as in `attention`.

    Returns:
        Of the shape, dtype and kind of x. A row of -inf alone gives zeros.

    Raises:
        TypeError: no array, or a dtype that is not supported.
        ValueError: no axis, or another number of passes.
    """
    if passes not in (2, 3):
        raise ValueError(f"passes is {passes!r}; it may be 2 or 3")
    adopted = arrays.adopt({"x": x}, backend)
    source = adopted.arrays["x"]
    dtype = dtype_name(source.dtype, "x")
    if source.ndim == 0:
        raise ValueError("x has shape (); it must have at least one axis")
    result = _empty(source.shape, DTYPES[dtype], adopted.on_gpu)
    if adopted.on_gpu:
        if result.size:
            rows = (math.prod(source.shape[:-1]), source.shape[-1])
            matrix = sys.modules["cupy"].ascontiguousarray(source.reshape(rows))
            launch.softmax(matrix, result.reshape(rows), dtype, passes, arch)
    else:
        _refuse_gpu_options(arch=arch)
        cpu.softmax(source, result, passes)
    return adopted.give_back(result)


def plan(
    q: Any,
    k: Any,
    v: Any,
    *,
    backward: bool = False,
    causal: bool = False,
    window: Window = None,
    softcap: float = 0.0,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    gradients: tuple[str, ...] = (),
    precision: Precision = "ieee",
    layout: LayoutName = "bshd",
    kernel: str | None = None,
    tiles: Tiles | None = None,
    arch: ArchLike | None = None,
    **side: Any,
) -> Plan:
    """The Plan that a call with these arrays would use on the GPU, and why; nothing is compiled or run.

    Args:
        q: anything with the shape and dtype of an array; likewise k and v. Nothing else of it is read, so
            the arrays are taken to be as well aligned as their rows allow.
        k: as above.
        v: as above.
        backward: plan `attention_backward` instead of `attention`.
        causal: as in `attention`; likewise the options below.
        window: as in `attention`.
        softcap: as in `attention`.
        score_mod: as in `attention`; likewise mask_mod.
        mask_mod: as above.
        dropout_p: as in `attention`.
        deterministic: as in `attention_backward`; with `backward` only.
        gradients: of "bias", "sink" and "score_mod", which stands for the arrays that it reads, those whose
            gradients are wanted too; with `backward` only.
        precision: as in `attention`.
        layout: as in `attention`.
        kernel: as in `attention`.
        tiles: as in `attention`.
        arch: what to plan for, be it here or not; on a machine without a GPU it must be given, or CUFA_ARCH
            set.
        side: the other arrays of `attention` and `attention_backward` by their names: bias, mask,
            alibi_slopes, sink, q_descale, k_descale, v_descale, cu_seqlens_q, cu_seqlens_k, seqused_k,
            block_table, dlse; described as q is.

    Returns:
        The Plan; `print` shows it.

    Raises:
        TypeError, ValueError: as `attention`; or an option of gradients without `backward`.
        GPUUnavailableError: no GPU, and no arch.
    """
    unknown = side.keys() - {*_FEATURE_ARRAYS, *_DESCALES, "dlse"}
    if unknown:
        raise TypeError(f"plan() got an unexpected argument {', '.join(sorted(unknown))}")
    if not backward:
        has_dlse = side.get("dlse") is not None
        refused = {"deterministic": deterministic, "gradients": gradients, "dlse": has_dlse}
        given = ", ".join(name for name, value in refused.items() if value)
        if given:
            raise ValueError(f"{given}: only gradients have that, and they are planned with backward=True")
    direction: Direction = "backward" if backward else "forward"
    mods = mods_of(score_mod, mask_mod)
    named = {"q": q, "k": k, "v": v} | _given(side) | mods.arrays
    described = tuple(_described(name, array) for name, array in named.items())
    values = _feature_values(softcap, dropout_p, seed=0, offset=0)
    asked = _asked(causal, window, values, layout, precision, mods, deterministic, gradients)
    problem = _known_of(direction, described, asked).problem
    row_bytes = (problem.head_dim | problem.value_dim) * problem.itemsize
    device = target(arch, for_plan_only=True)
    return make_plan(replace(problem, align_bytes=alignment(row_bytes)), device, kernel, tiles)


def _described(name: str, array: Any) -> Described:
    """Something with a shape and a dtype, which need be no more of an array than that, as if contiguous."""
    if not (hasattr(array, "shape") and hasattr(array, "dtype")):
        raise TypeError(f"{name} is a {arrays.kind_of(array)}; it must have a shape and a dtype")
    dtype = array.dtype
    if not isinstance(dtype, np.dtype):
        # A library with dtypes of its own spells them as NumPy does, behind its own name.
        dtype = np.dtype(str(dtype).rpartition(".")[2])
    shape = tuple(array.shape)
    return name, shape, contiguous_strides(shape, dtype.itemsize), dtype


@dataclass(frozen=True, eq=False)
class _Known:
    """What follows from options, shapes, strides and dtypes; calls that are alike have the same one.

    `outputs` are the names of those arrays that are to be written into. `layout` is that of the tensors;
    `axes` are where they have batch, seqlen and heads. `results` are the shapes and dtypes of what can be
    written. `copied` are the arrays that kernels cannot read as they lie.
    """

    problem: Problem
    options: Options
    arrays: tuple[Described, ...]
    outputs: tuple[str, ...]
    layout: Layout
    axes: Axes
    results: Mapping[str, tuple[Shape, np.dtype[Any]]]
    copied: tuple[str, ...]


class _Call:
    """The arrays of one call where it is computed, and the problem that they make.

    `wanted` are the shapes and dtypes of what is to be written, to arrays that are given or to new ones.
    """

    def __init__(self, direction: Direction, named: Arrays, asked: _Asked, backend: str | None) -> None:
        """Check all that is given; the arrays to write into are the last ones."""
        adopted = arrays.adopt(named, backend)
        self.tensors = adopted.arrays
        self.on_gpu = adopted.on_gpu
        self.wanted: dict[str, tuple[Shape, np.dtype[Any]]] = {}
        self._give_back = adopted.give_back
        self.addresses = adopted.addresses
        self.known = known = _known_of(direction, adopted.described, asked)
        self.problem = known.problem
        if known.outputs:
            arrays.check_writeable(adopted.sources, known.outputs)
            _check_apart(known, tuple(adopted.addresses.values()))
        if adopted.moved:
            described, self.addresses = arrays.describe(self.tensors)
            self.known = _known_of(direction, described, asked)

    def want(self, name: str) -> None:
        """Ask for a result."""
        self.wanted[name] = self.known.results[name]

    def allocate(self) -> None:
        """Have arrays for the results that are given none."""
        for name, (shape, dtype) in self.wanted.items():
            if name not in self.tensors:
                self.add(name, _empty(shape, dtype, self.on_gpu))

    def add(self, name: str, array: Any) -> None:
        """Have an array that was not given."""
        self.tensors[name] = array
        self.addresses[name] = arrays.address(array)

    def give_back(self, name: str, given: Any) -> Any:
        """A result for the caller: his own array if he gave one."""
        return self._give_back(self.tensors[name], given, name)

    def in_bshd(self, *names: str) -> list[Any]:
        """The tensors as (batch, seqlen, heads, dim); packed ones, which have no batch, as they are."""
        axes = (*check_layout(self.known.options.layout), 3)
        tensors = [self.tensors[name] for name in names]
        return [tensor.transpose(axes) if tensor.ndim == len(axes) else tensor for tensor in tensors]


# Which kernel to run where a caller wants another than the plan's, with what tiles, what to compile for; and
# whether it is `attn_probs` instead.
_Rung = tuple[str | None, tuple[tuple[str, int], ...], ArchLike | None, bool]


def _rung(kernel: str | None, tiles: Tiles | None, arch: ArchLike | None) -> _Rung:
    if tiles is None:
        return kernel, (), arch, False
    check_tiles(tiles)
    return kernel, tuple(tiles.items()), arch, False


# The arguments that are tensors, in the order of the parameter structs, and the arrays beside them.
_TENSORS: dict[Direction, tuple[str, ...]] = {
    "forward": ("q", "k", "v", "out"),
    "backward": ("q", "k", "v", "out", "dout", "dq", "dk", "dv"),
}
_KEY_TENSORS = frozenset(("k", "v", "dk", "dv"))
_FEATURE_ARRAYS = (
    *("bias", "mask", "alibi_slopes", "sink"),
    *("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table"),
)
_GRADIENT_ARRAYS = ("dlse", "dbias", "dsink")
_DESCALES = ("q_descale", "k_descale", "v_descale")
_BESIDE_TENSORS = frozenset(("lse", *_FEATURE_ARRAYS, *_DESCALES, *_GRADIENT_ARRAYS))

_NO_VALUES = FeatureValues()
# The fields of `Options`, which only a call that has not come before makes one of.
_Asked = tuple[bool, Window, bool, bool, bool, tuple[str, ...], str, str, Written | None, Written | None]


def _given(named: Arrays) -> Arrays:
    return {name: array for name, array in named.items() if array is not None}


def _feature_values(softcap: float, dropout_p: float, seed: int, offset: int) -> FeatureValues:
    if softcap == 0 and dropout_p == 0:
        return _NO_VALUES
    return FeatureValues(check_softcap(softcap), *check_dropout(dropout_p, seed, offset))


def _asked(
    causal: bool,
    window: Window,
    values: FeatureValues,
    layout: str,
    precision: str,
    mods: Mods,
    deterministic: bool = False,
    gradients: tuple[str, ...] = (),
) -> _Asked:
    """What a kernel is planned for, beyond the arrays: of values only whether there are any."""
    return (
        causal,
        window,
        values.softcap > 0,
        values.dropout_p > 0,
        deterministic,
        gradients,
        layout,
        precision,
        *mods.written(with_gradients="score_mod" in gradients),
    )


def _cpu_options(call: _Call, softmax_scale: float, values: FeatureValues, mods: Mods) -> dict[str, Any]:
    side = {name: call.tensors[name] for name in _FEATURE_ARRAYS if name in call.tensors}
    return {
        "causal": bool(call.known.options.causal),
        "window": call.known.options.window,
        "softmax_scale": softmax_scale,
        **asdict(values),
        **side,
        **mods.with_arrays(call.tensors)._asdict(),
    }


def _descaled(call: _Call, **tensors: Any) -> list[Any]:
    """Arrays of 8 bits in float32, multiplied with what the call has for each of them."""
    return [
        cpu.descaled(array, call.tensors.get(f"{name}_descale"), call.problem.kv_heads)
        for name, array in tensors.items()
    ]


def _known_of(direction: Direction, tensors: tuple[Described, ...], asked: _Asked) -> _Known:
    try:
        return _known(direction, tensors, asked)
    except TypeError:  # what an option without a hash raises, too
        options = Options(*asked)
        check_options(options)
        if not isinstance(options.window, list):
            raise
    return _known(direction, tensors, options._replace(window=tuple(options.window)))


@functools.lru_cache(maxsize=4096)
def _known(direction: Direction, tensors: tuple[Described, ...], asked: _Asked) -> _Known:
    options = Options(*asked)
    shapes = {name: shape for name, shape, _, _ in tensors}
    dtypes = {name: dtype for name, _, _, dtype in tensors}
    problem = make_problem(direction, shapes, dtypes, options)
    check_fits(problem, shapes, dtypes, options.layout)
    out = output_shape(problem, options.layout)
    features = problem.features
    axes = tensor_axes(options.layout, features.packed)
    key_axes = tensor_axes(options.layout, features.packed and not features.page_size)
    # What is not given is or will be contiguous.
    storage: dict[str, Storage] = {"out": (out, None), "dout": (out, None)}
    storage |= {f"d{name}": (shapes[name], None) for name in ("q", "k", "v")}
    storage |= {name: (shape, strides) for name, shape, strides, _ in tensors}
    itemsizes = tuple(
        problem.output.itemsize if name == "out" else problem.itemsize for name in _TENSORS[direction]
    )
    if direction == "forward":
        results = {"out": (out, problem.output), "lse": (lse_shape(problem), problem.accumulator)}
    else:
        of_features = (*("bias", "sink"), *features.differentiated_arrays)
        differentiated = [name for name in ("q", "k", "v", *of_features) if name in shapes]
        results = {f"d{name}": (shapes[name], dtypes[name]) for name in differentiated}
    names = _TENSORS[direction]
    axes_of = tuple(key_axes if name in _KEY_TENSORS else axes for name in names)
    layout = layout_of(tuple(storage[name] for name in names), itemsizes, axes_of)
    beside = (
        name
        for name, shape, strides, dtype in tensors
        if name in _BESIDE_TENSORS and not _is_read_as_it_lies(name, shape, strides, dtype.itemsize)
    )
    return _Known(
        problem=problem,
        options=options,
        arrays=tensors,
        outputs=tuple(name for name in results if name in shapes),
        layout=layout,
        axes=axes,
        results=results,
        copied=(*[names[place] for place in layout.scattered], *beside),
    )


def _empty(shape: Shape, dtype: np.dtype[Any], on_gpu: bool) -> Any:
    # What `empty` of both calls in the end, and faster.
    return (sys.modules["cupy"] if on_gpu else np).ndarray(shape, dtype)


@functools.lru_cache(maxsize=4096)
def _check_apart(known: _Known, addresses: tuple[int, ...]) -> None:
    """Check that outputs at these addresses share no memory with themselves or with other arrays."""
    regions = {
        name: Region(address, shape, strides, dtype.itemsize)
        for address, (name, shape, strides, dtype) in zip(addresses, known.arrays, strict=True)
    }
    check_apart(regions, known.outputs)


def _refuse_gpu_options(**options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name} is {value!r}, but this call computes on the CPU; it needs a GPU")


def _run_on_gpu(
    call: _Call,
    names: tuple[str, ...],
    layout: Layout,
    softmax_scale: float,
    values: FeatureValues,
    workspace: Any,
    rung: _Rung,
) -> None:
    """Launch the kernels for the tensors of these names, in the order of the parameter struct."""
    known, tensors, addresses = call.known, call.tensors, call.addresses
    given = [addresses[name] for name in names if name in addresses]
    if workspace is not None:
        workspace = arrays.on_current_gpu(workspace, "workspace")
    device_id = sys.modules["cupy"].cuda.runtime.getDevice()
    environment_arch = os.environ.get("CUFA_ARCH")
    align_bytes = layout.alignment(given)
    run, pack = _executable(known, layout, align_bytes, rung, environment_arch, device_id)
    call.allocate()
    if known.copied:
        copies = {name: arrays.contiguous(tensors[name]) for name in known.copied}
        tensors, addresses = tensors | copies, addresses | arrays.describe(copies)[1]
    features = b""
    if known.problem.features is not PLAIN:
        features = launch.pack_features(known.problem, tensors, addresses, values)
    packed = pack(*[addresses[name] for name in names])
    run(packed, addresses.get("lse", 0), softmax_scale, features, workspace)
    for name in known.copied:
        if name in call.wanted:
            call.tensors[name][...] = tensors[name]


def _is_read_as_it_lies(name: str, shape: Shape, strides: Shape, itemsize: int) -> bool:
    """Whether the kernels take an array without a copy; rows of some may lie apart."""
    if is_contiguous(shape, strides, itemsize):
        return True
    return name in ("bias", "mask", "block_table") and (shape[-1] == 1 or strides[-1] == itemsize)


def _write_probabilities(
    call: _Call, softmax_scale: float, values: FeatureValues, mods: Mods, arch: ArchLike | None
) -> None:
    """Write those of a forward call whose LSE is there."""
    if call.on_gpu:
        in_layout = probabilities.axes(call.known.options.layout)
        call.add("attn_probs", call.tensors["probs"].transpose(in_layout))
        names = ("q", "k", "v", "attn_probs")
        storage = tuple((call.tensors[name].shape, call.tensors[name].strides) for name in names)
        layout = layout_of(storage, call.problem.itemsize, call.known.axes)
        rung = (None, (), arch, True)
        _run_on_gpu(call, names, layout, softmax_scale, values, None, rung)
    else:
        q, k = call.in_bshd("q", "k")
        options = _cpu_options(call, softmax_scale, values, mods)
        probabilities.write(q, k, call.tensors["lse"], call.tensors["probs"], **options)


@functools.lru_cache(maxsize=4096)
def _executable(
    known: _Known,
    layout: Layout,
    align_bytes: int,
    rung: _Rung,
    environment_arch: str | None,
    device_id: int,
) -> tuple[launch.Executable, Callable[..., bytes]]:
    """What runs calls that are alike, and what packs their tensors."""
    problem = known.problem
    if align_bytes < problem.output.itemsize:
        raise ValueError(
            f"an array of {', '.join(_TENSORS[problem.direction])} has an address or a stride that is a "
            f"multiple of {align_bytes} bytes only; {problem.output} needs {problem.output.itemsize}"
        )
    placed = replace(problem, align_bytes=align_bytes, ascending=layout.ascending)
    executable = _loaded(placed, rung, environment_arch, device_id)
    return executable, executable.packer(layout)


@functools.lru_cache(maxsize=4096)
def _loaded(problem: Problem, rung: _Rung, environment_arch: str | None, device_id: int) -> launch.Executable:
    """The same one for calls whose layouts differ in strides alone."""
    kernel, tiles, arch, attn_probs = rung
    device = target(arch)
    if attn_probs:
        return launch.Executable(make_probabilities_plan(problem, device))
    return launch.Executable(make_plan(problem, device, kernel, dict(tiles)))
