import hashlib
import json
import logging
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import platformdirs
import pytest

from cufa import cache

KEY = hashlib.sha256(b"a variant").hexdigest()
OTHER = hashlib.sha256(b"another variant").hexdigest()
META = {"arch": "sm_90a", "log": "ptxas: café", "seconds": 0.1, "resources": {"k": {"registers": 8}}}
posix_only = pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX's")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    monkeypatch.setenv("CUFA_CACHE_DIR", str(path))
    monkeypatch.setattr(cache, "_warned", set())
    return path


@pytest.fixture
def binary():
    return os.urandom(3000)


def test_what_was_stored_is_found(folder, binary):
    stored = cache.store(KEY, binary, "cubin", META)
    found = cache.lookup(KEY)
    assert found == stored == cache.Entry(stored.path, META)
    assert found.path.parent == folder
    assert found.path.suffix == ".cubin"
    assert found.path.read_bytes() == binary
    assert cache.lookup(OTHER) is None


def test_an_entry_is_replaced_whole(monkeypatch, binary):
    old = cache.store(KEY, b"old", "cubin", META)
    replace, seen = Path.replace, []

    def while_read(path, target):
        seen.append(cache.lookup(KEY))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", while_read)
    new = cache.store(KEY, binary, "cubin", META | {"log": "new"})
    assert seen == [old, old]
    assert cache.lookup(KEY) == new
    assert old.path != new.path
    assert old.path.read_bytes() == b"old"  # a process that was told of it can still load it


def test_the_environment_names_the_folder_and_the_default_is_the_users(folder, monkeypatch):
    assert cache.directory() == folder
    monkeypatch.setenv("CUFA_CACHE_DIR", "~/kernels")
    assert cache.directory() == Path.home() / "kernels"
    monkeypatch.setenv("CUFA_CACHE_DIR", "")
    assert cache.directory() == platformdirs.user_cache_path("cufa", appauthor=False)


def test_a_relative_folder_is_one_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUFA_CACHE_DIR", "kernels")
    assert cache.directory() == tmp_path / "kernels"


@posix_only
def test_a_relative_folder_in_a_working_directory_that_was_deleted(tmp_path, monkeypatch, binary, caplog):
    deleted = tmp_path / "deleted"
    deleted.mkdir()
    monkeypatch.chdir(deleted)
    deleted.rmdir()
    monkeypatch.setenv("CUFA_CACHE_DIR", "kernels")
    assert cache.lookup(KEY) is None
    _assert_falls_back(Path("kernels"), binary, caplog, "No such file")


def test_the_folders_that_the_folder_is_in_are_made(tmp_path, monkeypatch, binary):
    folder = tmp_path / "some" / "kernels"
    monkeypatch.setenv("CUFA_CACHE_DIR", str(folder))
    assert cache.store(KEY, binary, "cubin", META).path.parent == folder


@posix_only
def test_folder_and_files_are_the_users_alone(folder, binary):
    cache.store(KEY, binary, "ptx", META)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


# --- damage ---------------------------------------------------------------------------------------


def _edit(**changes):
    def damage(record, binary):
        record.write_text(json.dumps(json.loads(record.read_text()) | changes))

    return damage


def _drop(field):
    def damage(record, binary):
        content = json.loads(record.read_text())
        del content[field]
        record.write_text(json.dumps(content))

    return damage


def _flip_a_bit(record, binary):
    data = bytearray(binary.read_bytes())
    data[len(data) // 2] ^= 1
    binary.write_bytes(data)


DAMAGES = {
    "truncated binary": lambda record, binary: binary.write_bytes(binary.read_bytes()[:-1]),
    "empty binary": lambda record, binary: binary.write_bytes(b""),
    "flipped bit": _flip_a_bit,
    "missing binary": lambda record, binary: binary.unlink(),
    "binary is a folder": lambda record, binary: (binary.unlink(), binary.mkdir()),
    "empty record": lambda record, binary: record.write_text(""),
    "truncated record": lambda record, binary: record.write_text(record.read_text()[:-2]),
    "record is not text": lambda record, binary: record.write_bytes(b"\xff\xfe\x00"),
    "record is a list": lambda record, binary: record.write_text("[1, 2]"),
    "record is a number": lambda record, binary: record.write_text("3"),
    "record is nested too deep": lambda record, binary: record.write_text("[" * 10**5),
    "record without a file": _drop("file"),
    "record without a checksum": _drop("sha256"),
    "record without meta": _drop("meta"),
    "other checksum": _edit(sha256="0" * 64),
    "other meta": _edit(meta=META | {"arch": "sm_100a"}),
    "file elsewhere": _edit(file="../other.cubin"),
    "file is no name": _edit(file=7),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_absent_until_it_is_stored_again(binary, damage, caplog):
    entry = cache.store(KEY, binary, "cubin", META)
    damage(entry.path.parent / f"{KEY}.json", entry.path)
    with caplog.at_level(logging.INFO, logger="cufa"):
        assert cache.lookup(KEY) is None
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert KEY in caplog.text
    if entry.path.is_dir():
        entry.path.rmdir()
    assert cache.lookup(OTHER) is None
    cache.store(KEY, binary, "cubin", META)
    assert cache.lookup(KEY) == entry
    assert entry.path.read_bytes() == binary


def test_a_file_that_is_elsewhere_is_not_read_even_with_its_checksum(folder, binary):
    entry = cache.store(KEY, binary, "cubin", META)
    (folder.parent / "planted.cubin").write_bytes(binary)
    _edit(file="../planted.cubin")(folder / f"{KEY}.json", entry.path)
    assert cache.lookup(KEY) is None


def test_a_plain_miss_is_not_logged(folder, caplog):
    with caplog.at_level(logging.DEBUG, logger="cufa"):
        assert cache.lookup(KEY) is None
    assert not caplog.records
    assert not folder.exists()


# --- folders that cannot be used ------------------------------------------------------------------


def _assert_falls_back(folder, binary, caplog, reason):
    first = cache.store(KEY, binary, "cubin", META)
    second = cache.store(OTHER, binary, "ptx", META)
    assert folder not in first.path.parents
    assert first.path.parent == second.path.parent
    assert first.path.read_bytes() == second.path.read_bytes() == binary
    if os.name == "posix":
        assert stat.S_IMODE(first.path.parent.stat().st_mode) == 0o700
    (warning,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    assert str(folder) in warning.getMessage()
    assert reason in warning.getMessage()
    assert not cache.info().writable


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch, binary, caplog):
    (tmp_path / "file").write_text("not a folder")
    folder = tmp_path / "file" / "cache"
    monkeypatch.setenv("CUFA_CACHE_DIR", str(folder))
    assert cache.lookup(KEY) is None
    _assert_falls_back(folder, binary, caplog, "Not a directory")
    assert cache.info() == cache.CacheInfo(folder, entries=0, bytes=0, unwritable="Not a directory")
    with pytest.raises(NotADirectoryError):
        cache.clear()


def test_each_folder_that_cannot_be_made_is_warned_of(tmp_path, monkeypatch, binary, caplog):
    (tmp_path / "file").write_text("not a folder")
    folders = [tmp_path / "file" / name for name in ("one", "other")]
    for folder in folders:
        monkeypatch.setenv("CUFA_CACHE_DIR", str(folder))
        cache.store(KEY, binary, "cubin", META)
    assert [message.partition(" cannot")[0] for message in caplog.messages] == [
        f"the cache folder {folder}" for folder in folders
    ]


def test_no_folder_at_all(tmp_path, monkeypatch, binary):
    def refuse(**options):
        raise FileNotFoundError(2, "No usable temporary directory found")

    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(cache.tempfile, "mkdtemp", refuse)
    cache._process_folder.cache_clear()
    with pytest.raises(
        OSError, match=r"neither in .*file .* nor in .*No usable temporary.*set CUFA_CACHE_DIR"
    ):
        cache.store(KEY, binary, "cubin", META)


@pytest.mark.parametrize("chosen", ["", "~/kernels"], ids=["the user's", "chosen"])
def test_a_folder_in_a_home_that_there_is_not(tmp_path, monkeypatch, binary, caplog, chosen):
    def refuse(*arguments, **options):
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setattr(Path, "expanduser", refuse)
    monkeypatch.setattr(cache.platformdirs, "user_cache_path", refuse)
    monkeypatch.setenv("CUFA_CACHE_DIR", chosen)
    monkeypatch.chdir(tmp_path)
    folder = Path(chosen or "~/.cache/cufa")
    reason = "the ~ in its name stands for no home folder"
    _assert_falls_back(folder, binary, caplog, reason)
    assert cache.lookup(KEY) is None
    assert not list(tmp_path.iterdir())
    assert cache.info() == cache.CacheInfo(folder, entries=0, bytes=0, unwritable=reason)


@pytest.mark.parametrize("step", ["mkstemp", "replace"])
def test_a_read_only_folder_is_still_read(folder, monkeypatch, binary, caplog, step):
    kept = cache.store(KEY, binary, "cubin", META)

    def refuse(target):
        if folder in Path(target).parents or Path(target) == folder:
            raise OSError(30, "Read-only file system", str(target))

    mkstemp, replace = cache.tempfile.mkstemp, Path.replace
    temporary_file = cache.tempfile.TemporaryFile
    if step == "mkstemp":
        monkeypatch.setattr(cache.tempfile, "mkstemp", lambda **kw: (refuse(kw["dir"]), mkstemp(**kw))[1])
    else:
        monkeypatch.setattr(Path, "replace", lambda self, to: (refuse(to), replace(self, to))[1])
    monkeypatch.setattr(
        cache.tempfile, "TemporaryFile", lambda **kw: (refuse(kw["dir"]), temporary_file(**kw))[1]
    )
    _assert_falls_back(folder, binary, caplog, "Read-only file system")
    assert cache.lookup(KEY) == kept
    assert cache.lookup(OTHER) is None
    assert not list(folder.glob(".cufa-*"))  # nothing half-written is left


@posix_only
def test_a_folder_that_everyone_may_write_to_is_neither_read_nor_written(folder, binary, caplog):
    cache.store(KEY, binary, "cubin", META)
    before = sorted(folder.iterdir())
    folder.chmod(0o777)
    assert cache.lookup(KEY) is None
    _assert_falls_back(folder, binary, caplog, "every user may write to it")
    assert sorted(folder.iterdir()) == before


def _let_it_be_another_users(monkeypatch, folder, owner, user):
    """Let `owner` seem to own the folder, and `user` seem to run this process."""
    real = Path.stat

    def of_owner(path, **options):
        status = real(path, **options)
        return SimpleNamespace(st_uid=owner, st_mode=status.st_mode) if path == folder else status

    monkeypatch.setattr(Path, "stat", of_owner)
    monkeypatch.setattr(os, "geteuid", lambda: user)


@posix_only
def test_a_folder_of_another_user_is_neither_read_nor_written(folder, binary, caplog, monkeypatch):
    cache.store(KEY, binary, "cubin", META)
    before = sorted(folder.iterdir())
    _let_it_be_another_users(monkeypatch, folder, owner=1000, user=1001)
    assert cache.lookup(KEY) is None
    _assert_falls_back(folder, binary, caplog, "another user owns it")
    assert sorted(folder.iterdir()) == before


@posix_only
def test_a_folder_of_root_is_read(folder, binary, monkeypatch):
    kept = cache.store(KEY, binary, "cubin", META)
    _let_it_be_another_users(monkeypatch, folder, owner=0, user=1001)
    assert cache.lookup(KEY) == kept
    folder.chmod(0o777)
    assert cache.lookup(KEY) is None


FORKED = """
from multiprocessing import get_context
worker = get_context("fork").Process(target=store)
worker.start()
worker.join()
"""


@pytest.mark.parametrize("run", ["store()", pytest.param(FORKED, marks=posix_only)], ids=["itself", "forked"])
def test_the_fallback_folder_goes_with_the_process(tmp_path, run):
    (tmp_path / "file").write_text("not a folder")
    code = f"""
from cufa import cache
def store():
    print(cache.store({KEY!r}, b'code', 'cubin', {{}}).path, flush=True)
{run}
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"CUFA_CACHE_DIR": str(tmp_path / "file" / "cache")},
        capture_output=True,
        text=True,
        check=True,
    )
    path = Path(result.stdout.strip())
    assert path.name.startswith(KEY)
    assert not path.parent.exists()


def test_a_fallback_folder_that_is_removed_is_made_again(tmp_path, monkeypatch, binary):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("CUFA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    first = cache.store(KEY, binary, "cubin", META).path
    shutil.rmtree(first.parent)
    again = cache.store(KEY, binary, "cubin", META).path
    assert again.read_bytes() == binary
    assert again.parent != first.parent


@pytest.mark.parametrize(("steps", "is_whole"), [((True,), True), ((True, False, True), False)])
def test_a_folder_that_is_cleared_amid_a_write(folder, monkeypatch, binary, caplog, steps, is_whole):
    replace, clears = Path.replace, iter(steps)

    def cleared(path, target):
        if next(clears, False):
            assert cache.clear() > 0
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", cleared)
    stored = cache.store(KEY, binary, "cubin", META)
    assert stored.path.parent == folder
    assert not caplog.records
    assert cache.lookup(KEY) == (stored if is_whole else None)


def test_what_killed_processes_left_goes_after_a_day(folder, binary):
    cache.store(KEY, binary, "cubin", META)
    ages = {".cufa-old_1.tmp": 25, ".cufa-new_1.tmp": 23, "mine.tmp": 25}
    for name, hours in ages.items():
        (folder / name).touch()
        os.utime(folder / name, (time.time() - 3600 * hours,) * 2)
    cache.store(OTHER, binary, "ptx", META)
    assert {path.name for path in folder.glob("*.tmp")} == {".cufa-new_1.tmp", "mine.tmp"}
    assert cache.info().entries == 2


def test_entries_stay_however_old_they_are(folder, binary):
    entry = cache.store(KEY, binary, "cubin", META)
    for path in folder.iterdir():
        os.utime(path, (time.time() - 3600 * 25,) * 2)
    cache.store(OTHER, binary, "ptx", META)
    assert cache.lookup(KEY) == entry


# --- info and clear -------------------------------------------------------------------------------


def test_info_counts_entries_and_bytes(folder, binary):
    assert cache.info() == cache.CacheInfo(folder, entries=0, bytes=0, unwritable=None)
    assert not folder.exists()
    cache.store(KEY, binary, "cubin", META)
    cache.store(OTHER, binary, "ptx", META)
    info = cache.info()
    assert info == cache.CacheInfo(folder, 2, sum(p.stat().st_size for p in folder.iterdir()), None)
    assert info.bytes > 2 * len(binary)


def test_a_file_that_goes_meanwhile_is_left_out(monkeypatch, binary):
    cache.store(KEY, binary, "cubin", META)
    info, own_files = cache.info(), cache._own_files
    monkeypatch.setattr(cache, "_own_files", lambda path: [*own_files(path), path / ".cufa-gone_1.tmp"])
    assert cache.info() == info
    cache.clear()
    assert cache.info().entries == 0


def test_clear_removes_what_is_cufas_and_nothing_else(folder, binary):
    cache.store(KEY, binary, "cubin", META)
    cache.store(OTHER, binary, "ptx", META)
    (folder / ".cufa-abc123_x.tmp").write_bytes(b"left by a process that was killed")
    foreign = ["notes.json", f"{KEY}.txt", f"{KEY}.cubin", "x.cubin", ".cufa", f"{KEY[:-1]}.json"]
    for name in foreign:
        (folder / name).write_text("mine")
    assert cache.clear() == 5
    assert sorted(path.name for path in folder.iterdir()) == sorted(foreign)
    assert cache.lookup(KEY) is None
    assert cache.clear() == 0
