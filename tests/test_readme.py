"""The README's figures are those of the records in benchmarks/."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_figures_are_those_of_the_records():
    check = [sys.executable, str(ROOT / "scripts" / "readme_figures.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_the_guide_to_the_kernels_names_each_header_once():
    guide = ROOT / "cufa" / "kernels" / "README.md"
    named = re.findall(r"`(\w+\.cuh)`", guide.read_text().split("Where to touch what")[0])
    assert sorted(named) == sorted(path.name for path in guide.parent.glob("*.cuh"))
