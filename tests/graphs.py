"""Calls as CUDA graphs."""


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
