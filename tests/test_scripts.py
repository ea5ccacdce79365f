"""The scripts as commands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import gpu_check  # noqa: E402

# Runs a script with whatever it imports of libraries that are only of use on a GPU.
WITHOUT_LIBRARIES = """
import runpy, sys
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock
from cufa import device

class Libraries:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("cupy", "torch"):
            return ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return MagicMock()
    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Libraries())
device.gpu_present = lambda: False
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.skipif(os.name != "posix", reason="only POSIX has executable files")
def test_scripts_that_are_commands_can_be_run():
    texts = {path: path.read_text() for path in SCRIPTS.glob("*.py")}
    commands = {path for path, text in texts.items() if '__name__ == "__main__"' in text}
    commands -= {SCRIPTS / "gpu_check.py"}  # scripts/gpu_check runs it
    assert commands
    for path, text in texts.items():
        assert os.access(path, os.X_OK) == text.startswith("#!") == (path in commands), path


@pytest.mark.parametrize("name", ["bias", "decode", "flex", "fp8", "latent", "peers", "serving", "shapes"])
def test_only_what_is_timed_needs_a_gpu(name):
    def run(*arguments):
        command = [sys.executable, "-c", WITHOUT_LIBRARIES, str(SCRIPTS / f"bench_{name}.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    helped = run("--help")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert "--rounds" in helped.stdout
    timed = run()
    assert timed.returncode == 1
    assert timed.stderr.startswith(f"bench_{name}.py needs a GPU: ")


BEFORE = {"ok": False, "passed": 7, "failed": 1, "error": 1, "skipped": 3, "failures": ["a", "b"]}


@pytest.mark.parametrize(
    ("again", "expected"),
    [
        (
            {"ok": True, "passed": 2, "failures": []},
            {"ok": True, "passed": 9, "failed": 0, "skipped": 3, "failures": []},
        ),
        (
            {"ok": False, "passed": 1, "error": 1, "failures": ["b"]},
            {"ok": False, "passed": 8, "failed": 0, "error": 1, "skipped": 3, "failures": ["b"]},
        ),
        (
            {"ok": False, "failures": ["a"]},
            {"ok": False, "passed": 7, "failed": 0, "skipped": 3, "failures": ["a"]},
        ),
    ],
)
def test_gpu_tests_that_run_again(monkeypatch, again, expected):
    chosen = []
    monkeypatch.setattr(gpu_check, "tests", lambda names: chosen.append(names) or again)
    assert gpu_check.tests_again(BEFORE) == expected
    assert chosen == [["a", "b"]]


def test_no_gpu_test_runs_again_if_none_failed(monkeypatch):
    monkeypatch.setattr(gpu_check, "tests", lambda names: pytest.fail(f"{names} run"))
    right = {"ok": True, "passed": 9, "failures": []}
    assert gpu_check.tests_again(right) == right
