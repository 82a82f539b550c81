"""What git holds, which is what others get: a plain top level, no index host or private path, a lock for any index."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
TOP_LEVEL = """
    packages tests-integration noxfile.py pyproject.toml uv.lock
    README.md DESIGN.md CHANGELOG.md CONTRIBUTING.md LICENSE
"""


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def committed():
    """Every text file in git's index, by name."""
    for line in git("grep", "--cached", "-I", "--name-only", "-e", "").splitlines():
        yield line, git("show", f":{line}")


def test_the_top_level_holds_the_workspace_and_nothing_else():
    names = {name.split("/")[0] for name in git("ls-files").splitlines()}
    assert {name for name in names if not name.startswith(".")} == set(TOP_LEVEL.split())


def test_no_committed_file_names_an_index_or_a_path_of_this_machine():
    hosts = r"pypi[.]org|pythonhosted[.]org|npmjs[.](?:org|com)"
    homes = r"/(?:home|Users|root)/[\w.-]+/"
    # Folders near the root, such as the parent of a checkout in /src, are no path that tells a machine.
    here = [re.escape(f"{path}/") for path in (ROOT.parent, Path.home()) if path != path.parent]
    forbidden = re.compile("|".join([hosts, homes, *here]))
    found = [f"{name}: {match[0]}" for name, text in committed() for match in forbidden.finditer(text)]
    assert found == []


def test_the_lock_names_no_address_and_every_file_has_a_hash():
    text = git("show", ":uv.lock")
    assert "://" not in text
    for package in tomllib.loads(text)["package"]:
        if "registry" in package["source"]:
            assert package["source"] == {"registry": "wheels"}
            artefacts = [package["sdist"]] if "sdist" in package else []
            artefacts += package.get("wheels", [])
            assert artefacts
            assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", artefact["hash"]) for artefact in artefacts)
            assert all("/" not in artefact["path"] for artefact in artefacts)


def test_the_lock_knows_every_member():
    names = {package["name"] for package in tomllib.loads(git("show", ":uv.lock"))["package"]}
    assert {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")} <= names
