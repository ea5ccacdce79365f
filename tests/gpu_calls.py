"""What tests on a GPU do with cases of feature_cases.py: their arrays there, calls, and what came of them."""

import numpy as np
import pytest
from tolerance import assert_attention

import cufa
from cufa import device, driver, jit
from cufa.kernels import KERNELS


def skip_unless_it_runs_here(kernel):
    only = KERNELS[kernel].only_arch
    if only is not None and str(cufa.Device.of(only).arch) != str(device.current().arch):
        pytest.skip(f"{kernel} needs sm_{only}")


def skip_unless_the_driver_reads_ptx():
    if jit.nvrtc_version() > driver.cuda_version():
        pytest.skip("NVRTC is newer than the driver, which does not read its PTX")


def on_gpu(cupy, arguments):
    return {
        name: cupy.asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }


def tensors(cupy, case):
    problem = case.problem
    return [cupy.asarray(x) for x in (problem.q, problem.k, problem.v, problem.dout)]


def results_of(case):
    """Shape and dtype of out and lse."""
    problem = case.problem
    return (problem.dout.shape, problem.dout.dtype), (
        problem.lse_shape,
        np.float64 if problem.dout.dtype == np.float64 else np.float32,
    )


def written(case, out, lse):
    """out and lse on the host; tokens that belong to no sequence must be left alone, and count as 0."""
    out, lse = out.get(), lse.get()
    if "cu_seqlens_q" in case.arrays:
        begin, end = case.arrays["cu_seqlens_q"][[0, -1]]
        outside = np.r_[0:begin, end : len(out)]
        assert np.isnan(out[outside].astype(np.float32)).all()
        assert np.isnan(lse[:, outside]).all()
        out[outside], lse[:, outside] = 0, -np.inf
    return out, lse


def check_forward(cupy, case, **options):
    """Hold what a forward call writes to the rule."""
    q, k, v, _ = tensors(cupy, case)
    out, lse = (cupy.full(shape, np.nan, kind) for shape, kind in results_of(case))
    cufa.attention(q, k, v, **on_gpu(cupy, case.forward), out=out, lse=lse, **options)
    with np.errstate(invalid="ignore"):
        assert_attention(*written(case, out, lse), case.problem, **case.forward)


def captured(cupy, call):
    """A graph of what `call` puts on the current stream, and what that call returned.

    It is called once before, since compiling and loading cannot be captured.
    """
    stream = cupy.cuda.get_current_stream()
    call()
    stream.synchronize()
    stream.begin_capture()
    returned = call()
    return stream.end_capture(), returned
