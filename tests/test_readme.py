"""The READMEs' figures are those of the records, their links lead somewhere, their code runs."""

import functools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from cufa import cli
from cufa.kernels import COMPANIONS, KERNELS

ROOT = Path(__file__).resolve().parent.parent
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
BENCHMARKS = ROOT / "benchmarks" / "README.md"
GUIDE = ROOT / "cufa" / "kernels" / "README.md"
PLANS = ROOT / "cufa" / "plan" / "README.md"


def test_figures_are_those_of_the_records():
    check = [sys.executable, str(ROOT / "scripts" / "readme_figures.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


SELECTIONS = re.findall(r'(tests/\w+\.py) -k ("[^"]+"|\w+)', CONTRIBUTING.read_text())


@pytest.mark.parametrize(("file", "expression"), SELECTIONS)
def test_the_selections_of_tests_have_some(file, expression):
    select = [sys.executable, "-m", "pytest", "--collect-only", "-q", file, "-k", expression.strip('"')]
    done = subprocess.run(select, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("page", [ROOT / "README.md", CONTRIBUTING, BENCHMARKS, GUIDE, PLANS])
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    files = [link for link in links if not link.startswith("https://")]
    assert files
    for link in files:
        assert (page.parent / link).exists(), link


def blocks(language: str) -> list[str]:
    """The README's blocks of code in a language."""
    fenced = re.split(r"^```", (ROOT / "README.md").read_text(), flags=re.MULTILINE)[1::2]
    parts = (block.partition("\n") for block in fenced)
    return [code for name, _, code in parts if name == language]


def test_the_code_runs_in_numpy(capsys):
    names = {}
    code = blocks("python")
    assert code[0].startswith("import cupy as cp")
    for block in code:
        exec(block.replace("import cupy as cp", "import numpy as cp", 1), names)
    assert capsys.readouterr().out.startswith("fwd_4_flash_v2 on GeForce RTX 3090 (sm_86)")


def test_the_commands_have_these_options():
    lines = [line.strip() for block in blocks("") for line in re.split(r"[\n;]", block)]
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("cufa ")]
    assert len(commands) > 10
    for name, *arguments in commands:
        command = cli.main.get_command(click.Context(cli.main), name)
        command.make_context(name, arguments)


def test_the_guide_to_the_kernels_names_each_header_once():
    table = GUIDE.read_text().split("## What is where")[1].split("##")[0]
    rows = re.findall(r"^\| (?:\[(.*)\]\(.*\) )?\| .* \| (.*) \|$", table, re.MULTILINE)
    named, folder = [], ""
    for beginning, headers in rows:
        folder = beginning or folder  # of a folder's rows the first alone names it
        named += [f"{folder}/{name}" for name in re.findall(r"`(\w+\.cuh)`", headers)]
    assert sorted(map(Path, named)) == sorted(
        path.relative_to(GUIDE.parent) for path in GUIDE.parent.rglob("*.cuh")
    )


def test_the_guide_to_plans_names_each_module_once():
    second_columns = re.findall(r"^\|[^|]*\|([^|]*)\|", PLANS.read_text(), re.MULTILINE)
    named = re.findall(r"`(\w+\.py)`", " ".join(second_columns))
    assert sorted(named) == sorted(path.name for path in PLANS.parent.glob("*.py") if path.stem != "__init__")


def test_the_guide_to_the_kernels_has_the_ladder_in_order():
    rungs = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", GUIDE.read_text().split("##")[0], re.MULTILINE)
    assert [name for name, _ in rungs] == list(KERNELS)
    for name, headers in rungs:
        for header in re.findall(r"`(\w+\.cuh)`", headers):
            names = {Path(each).name for each in included(f"{name}.cu")}
            assert header in names, f"{header} is not among those of {name}"


@functools.cache
def included(source: str) -> frozenset[str]:
    """The headers that a source includes, directly or not."""
    found = frozenset(re.findall(r'^#include "(.*)"$', (GUIDE.parent / source).read_text(), re.MULTILINE))
    return found.union(*map(included, found))


def test_headers_that_python_names_are_there():
    there = {path.name for path in GUIDE.parent.rglob("*.cuh")} | {"score_mod.cuh"}  # written for a call
    for path in (ROOT / "cufa").rglob("*.py"):
        assert set(re.findall(r"\b(\w+\.cuh)\b", path.read_text(encoding="utf-8"))) <= there, path


def test_the_guide_to_the_kernels_lists_the_papers_that_are_cited():
    listed = set(re.findall(r"^\| (.*?\d{4}) \|", GUIDE.read_text(), re.MULTILINE))
    cited = {kernel.paper.partition(",")[0] for of in (KERNELS, COMPANIONS) for kernel in of.values()}
    for path in (*GUIDE.parent.rglob("*.cu*"), *GUIDE.parent.parent.rglob("*.py")):
        cited.update(re.findall(r"\b\w+ (?:et al\.|and \w+) \d{4}", path.read_text()))
    assert cited <= listed
