"""What the members' pyproject.toml say: one version, exact pins, and where MLX is asked for."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))


def project(folder):
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def requirements(folder):
    extras = project(folder).get("optional-dependencies", {}).values()
    return [Requirement(text) for texts in [project(folder)["dependencies"], *extras] for text in texts]


def test_the_workspace_and_every_member_have_one_version():
    assert len({project(folder)["version"] for folder in [ROOT, *PACKAGES]}) == 1


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
def test_members_pin_each_other_exactly_at_that_version(folder):
    pins = {str(need) for need in requirements(folder) if need.name.startswith("mlxrl")}
    assert pins == {f"{Requirement(pin).name}=={project(ROOT)['version']}" for pin in pins}


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
def test_a_member_asks_for_mlx_only_where_it_has_wheels(folder):
    windows = {"sys_platform": "win32", "platform_machine": "AMD64"}
    intel_mac = {"sys_platform": "darwin", "platform_machine": "x86_64"}
    needs = [need for need in requirements(folder) if need.name in {"mlx", "mlx-lm"}]
    # A requirement without a marker holds everywhere, and is as wrong as one whose marker is true there.
    assert [str(need) for need in needs if not need.marker or need.marker.evaluate(windows)] == []
    assert [str(need) for need in needs if not need.marker or need.marker.evaluate(intel_mac)] == []


@pytest.mark.parametrize("name", ["mlxrl-env", "mlxrl-memory"])
def test_the_plain_python_members_need_nothing(name):
    assert project(ROOT / "packages" / name)["dependencies"] == []


def test_wheels_are_built_by_the_hatchling_that_the_tests_build_with():
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (constraint,) = root["tool"]["uv"]["build-constraint-dependencies"]
    assert constraint in root["dependency-groups"]["workspace"]
