"""Arrays from and to `.npy` and `.npz` files, never through pickle."""

from __future__ import annotations

import contextlib
import io
import lzma
import tempfile
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from cufa.cli.output import Failure, OutOfMemory, Wrong
from cufa.problem import DTYPES, FLOAT8, INPUT_DTYPES

Array = np.ndarray[Any, np.dtype[Any]]

SUFFIXES = (".npy", ".npz")
# How files of these kinds begin.
_BEGINNINGS = (np.lib.format.MAGIC_PREFIX, b"PK")

# How NumPy's format stores dtypes that it does not know by name.
_STORED = {np.dtype("V2"): ("bfloat16", "two opaque bytes"), np.dtype("V1"): (FLOAT8, "an opaque byte")}


# What NumPy, or Python inside it, raises for files that are not arrays, are broken or are encrypted.
_UNREADABLE = (
    *(ValueError, TypeError, OverflowError, EOFError, tokenize.TokenError),
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, NotImplementedError, RuntimeError),
)


def load(name: str, location: str, dtype: str | None) -> Array:
    """The array `name` from FILE or FILE:KEY.

    KEY selects an array of an .npz file, by default `name`. With `dtype`, other float dtypes are converted,
    and bfloat16 or float8, which NumPy stores as opaque bytes, is recovered, of a bias without `dtype`, too.

    Raises Failure if there is no such file or array, if reading it would need pickle, or if a number is too
    large for `dtype`; OutOfMemory if the memory does not suffice.
    """
    if not location:
        raise Failure(f"--{name} '': the file has no name")
    file, key = _split(location)
    option = f"--{name} {location}"
    try:
        with Path(file).open("rb") as stream:
            rewindable = stream if stream.seekable() else io.BytesIO(stream.read())
            beginning = rewindable.read(len(np.lib.format.MAGIC_PREFIX))
            if beginning and not beginning.startswith(_BEGINNINGS):
                raise ValueError("it does not begin like one")
            rewindable.seek(0)
            loaded = np.load(rewindable, allow_pickle=False)
            if isinstance(loaded, np.lib.npyio.NpzFile):
                with loaded:
                    array = _member(loaded, key or name, option)
            elif key is not None:
                raise Failure(f"{option}: only an .npz file has arrays by name; this is an .npy file")
            else:
                array = loaded
    except OSError as error:
        raise Failure(f"{option}: {error.strerror or error}") from error
    except MemoryError as error:
        raise OutOfMemory(f"{option}: out of memory: {error}") from error
    except _UNREADABLE as error:
        reason = str(error).partition(". ")[0]  # the rest of NumPy's message tells how to unpickle it
        raise Failure(f"{option}: it is no .npy or .npz file of numbers ({reason})") from error
    return _as_dtype(name, array, dtype, option)


def check_destination(path: Path, locations: Mapping[str, str | None]) -> None:
    """Raise Failure if `save` cannot write there, or would overwrite an input; call this before all else."""
    if path.suffix.lower() not in SUFFIXES:
        raise Failure(f"--out {path}: the file's name must end with {' or '.join(SUFFIXES)}")
    check_folder("--out", path)
    for name, location in locations.items():
        if location is not None and path.exists() and _is(path, Path(_split(location)[0])):
            raise Failure(f"--out {path}: --{name} is read from that file; give another")


def check_folder(option: str, path: Path) -> None:
    """Raise Failure if the file that an option names cannot be written; call this before all else."""
    if not path.parent.is_dir():
        raise Failure(f"{option} {path}: there is no folder {path.parent}")
    try:
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise Failure(f"{option} {path}: {error.strerror or error}") from error


def save(path: Path, results: Mapping[str, Array]) -> bool:
    """Write `out` alone to an .npy file, or all results by name to an .npz file.

    Returns whether one of them is bfloat16, of which NumPy stores that elements have two opaque bytes.
    """
    alone = path.suffix.lower() == ".npy"
    written = {"out": results["out"]} if alone else results
    with writing("--out", path) as stream:
        if alone:
            np.save(stream, written["out"], allow_pickle=False)
        else:
            np.savez(stream, allow_pickle=False, **written)
    return any(array.dtype == DTYPES["bfloat16"] for array in written.values())


@contextlib.contextmanager
def writing(option: str, path: Path) -> Iterator[IO[bytes]]:
    """Open the file that an option names; raise Wrong, and leave no part of it, if it cannot be written."""
    try:
        stream = path.open("wb")
        try:
            with stream:
                yield stream
        except BaseException:
            if path.is_file():
                path.unlink()
            raise
    except OSError as error:
        # NumPy only says how much of an array was written.
        reason = error.strerror or f"it cannot be written whole: {error}"
        raise Wrong(f"{option} {path}: {reason}") from error


def _is(path: Path, other: Path) -> bool:
    """Whether another path leads to the same file, as a link does, too."""
    return other.exists() and path.samefile(other)


def _split(location: str) -> tuple[str, str | None]:
    """Split FILE:KEY; a file name may also contain a colon."""
    file, colon, key = location.rpartition(":")
    if colon and key and not Path(location).exists() and Path(file).suffix in SUFFIXES:
        return file, key
    return location, None


def _member(archive: Any, key: str, option: str) -> Array:
    if key not in archive:
        have = ", ".join(archive) or "none"
        raise Failure(f"{option}: there is no array {key!r} in the file; it has {have}")
    array = archive[key]
    if not isinstance(array, np.ndarray):
        raise Failure(f"{option}: what the file has as {key!r} is no array")
    return array


def _as_dtype(name: str, array: Array, dtype: str | None, option: str) -> Array:
    if array.dtype in _STORED:
        stored, as_bytes = _STORED[array.dtype]
        if dtype != stored and (name, stored) != ("bias", "bfloat16"):
            # Files are read in order: if q had 8 bits, it would have been refused before.
            by = "--kv-dtype" if name in ("k", "v") and stored == FLOAT8 else "--dtype"
            raise Failure(
                f"{option}: it holds {as_bytes} for each element, as NumPy stores {stored}; "
                f"if that is what they are, add {by} {stored}"
            )
        return array.view(INPUT_DTYPES[stored])
    if dtype is not None and np.issubdtype(array.dtype, np.floating):
        with np.errstate(over="ignore"):
            converted = array.astype(INPUT_DTYPES[dtype], copy=False)
        for number in array[np.isfinite(array) & ~np.isfinite(converted)][:1]:
            raise Failure(f"{option}: it has {number}, which is too large for {dtype}")
        return converted
    return array
