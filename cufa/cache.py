"""Compiled kernels on disk: found by key, checked when read, replaced atomically when written.

An entry is two files: `<key>-<digest>.cubin` (or `.ptx`), and `<key>.json`, which names it and holds the
compiler's report. Each is written under a temporary name and renamed, the binary first, so that a reader sees
an old entry, a new one or none. The binary's name contains its digest: if two processes compile the same key
at once to different bytes, each .json still names the right bytes.

The folder is CUFA_CACHE_DIR, by default in the user's cache folder. Its code runs on the GPU, so a folder
that another user than root owns or that everyone may write to is not used.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

FORMAT_VERSION = 1  # part of every key; raise it when the form of entries or the compiled code changes

_log = logging.getLogger("cufa")
_OWN_NAME = re.compile(r"[0-9a-f]{64}(\.json|-[0-9a-f]{16}\.(cubin|ptx))|\.cufa-\w+\.tmp")
_warned: set[Path] = set()


@dataclass(frozen=True)
class Entry:
    """A compiled kernel: the file, and the data stored with it (plain JSON values)."""

    path: Path
    meta: dict[str, Any]


@dataclass(frozen=True)
class CacheInfo:
    """The cache folder, its number of entries, their bytes, and why it cannot be written to, if so."""

    path: Path
    entries: int
    bytes: int
    unwritable: str | None

    @property
    def writable(self) -> bool:
        """Whether the folder can be written to."""
        return self.unwritable is None


def directory() -> Path:
    """The cache folder: CUFA_CACHE_DIR, else the user's cache folder. It need not exist.

    Without a home folder, its name begins with ~, and it is not used. In a working directory
    that was deleted, its name may be relative.
    """
    chosen = os.environ.get("CUFA_CACHE_DIR")
    try:
        if chosen:
            return Path(chosen).expanduser().absolute()
        return platformdirs.user_cache_path("cufa", appauthor=False)
    except (RuntimeError, FileNotFoundError):  # the ~ stands for no folder, or there is no working directory
        return Path(chosen or "~/.cache/cufa")


def lookup(key: str) -> Entry | None:
    """The entry of `key` (64 hex digits), or None if there is none or it is damaged."""
    record = directory() / f"{key}.json"
    try:
        if not record.exists():
            return None
        _require_private(record.parent)
        return _read(record)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        _log.info("ignoring a cache entry: %s (%s)", error, record)
        return None


def store(key: str, binary: bytes, kind: str, meta: dict[str, Any]) -> Entry:
    """Store `binary` (`kind` is "cubin" or "ptx") and `meta` under `key`.

    If the cache folder cannot be used, this warns once and stores them in a private folder that lasts as
    long as the process.
    """
    folder = directory()
    try:
        _make(folder)
        _remove_leftovers(folder)
        return _write(folder, key, binary, kind, meta)
    except OSError as error:
        if folder not in _warned:
            _warned.add(folder)
            _log.warning(
                "the cache folder %s cannot be used (%s): kernels that cannot be read from it will be "
                "compiled again in every process; set CUFA_CACHE_DIR to a folder of your own",
                folder,
                error,
            )
        try:
            # It may have been removed from outside, or this is a fork whose parent has ended.
            if not _process_folder().is_dir():
                _process_folder.cache_clear()
            return _write(_process_folder(), key, binary, kind, meta)
        except OSError as of_process:
            raise OSError(
                f"compiled kernels can be kept neither in the cache folder {folder} ({error}) nor in one of "
                f"this process ({of_process}); set CUFA_CACHE_DIR to a folder that can be written to"
            ) from of_process


def info() -> CacheInfo:
    """Describe the contents of the cache folder."""
    folder = directory()
    size = entries = 0
    files: list[Path] = []
    with contextlib.suppress(OSError):  # it can then not be written to, either
        files = _own_files(folder)
    for path in files:
        with contextlib.suppress(FileNotFoundError):  # a temporary file that has been renamed
            size += path.stat().st_size
        entries += path.suffix == ".json"
    return CacheInfo(path=folder, entries=entries, bytes=size, unwritable=_unwritable(folder))


def clear() -> int:
    """Remove every file that cufa keeps in the cache folder, and nothing else. Return their number."""
    files = _own_files(directory())
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)


def _read(record: Path) -> Entry:
    content = json.loads(record.read_bytes())
    meta = content["meta"]
    path = record.with_name(content["file"])  # refuses a name that points out of the folder
    if _digest(path.read_bytes(), meta) != content["sha256"]:
        raise ValueError("its checksum does not match")
    return Entry(path, meta)


def _write(folder: Path, key: str, binary: bytes, kind: str, meta: dict[str, Any]) -> Entry:
    name = f"{key}-{hashlib.sha256(binary).hexdigest()[:16]}.{kind}"
    content = {"file": name, "sha256": _digest(binary, meta), "meta": meta}
    for file, data in ((name, binary), (f"{key}.json", json.dumps(content).encode())):
        try:
            _replace(folder / file, data)
        except FileNotFoundError:  # another process has cleared the cache, with the temporary file
            _replace(folder / file, data)
    return Entry(folder / name, meta)


def _digest(binary: bytes, meta: dict[str, Any]) -> str:
    return hashlib.sha256(binary + json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _replace(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(prefix=".cufa-", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _make(folder: Path) -> None:
    _require_home(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_private(folder)


def _require_home(folder: Path) -> None:
    if str(folder).startswith("~"):
        raise FileNotFoundError("the ~ in its name stands for no home folder")


def _require_private(folder: Path) -> None:
    _require_home(folder)
    if os.name != "posix":
        return
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0):  # root could change any folder
        raise PermissionError("another user owns it")
    if status.st_mode & stat.S_IWOTH:
        raise PermissionError("every user may write to it")


def _unwritable(folder: Path) -> str | None:
    """Why the folder can neither be written to nor created; creates nothing."""
    try:
        _require_home(folder)
        if folder.exists():
            _require_private(folder)
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _own_files(folder: Path) -> list[Path]:
    """The files that cufa keeps in the folder; none if there is no folder."""
    try:
        return [path for path in folder.iterdir() if _OWN_NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []


def _remove_leftovers(folder: Path) -> None:
    """Remove temporary files of processes that were killed amid a write, a day or more ago."""
    yesterday = time.time() - 24 * 60 * 60
    for path in _own_files(folder):
        with contextlib.suppress(OSError):  # another process has renamed or removed it
            if path.suffix == ".tmp" and path.stat().st_mtime < yesterday:
                path.unlink()


@functools.cache
def _process_folder() -> Path:
    from multiprocessing.util import Finalize  # takes 10 ms

    folder = Path(tempfile.mkdtemp(prefix="cufa-"))
    # Not atexit, which forked workers of multiprocessing skip before Python 3.13. A forked child leaves its
    # parent's folder alone.
    Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=-1)
    return folder
