"""Every member's wheel: its portion of the namespace, whole, and nothing beside it."""

import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
def test_a_wheel_holds_its_portion_and_nothing_else(folder, tmp_path):
    (built,) = WheelBuilder(str(folder)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(built) as wheel:
        names = set(wheel.namelist())
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        headers = message_from_bytes(wheel.read(metadata))

    source, info = folder / "src", metadata.removesuffix("METADATA")
    portion = f"mlxrl/{folder.name.removeprefix('mlxrl-')}/"
    on_disk = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {portion + "__init__.py", portion + "py.typed"} <= names
    assert {name for name in names if not name.startswith(info)} == on_disk
    assert {name for name in on_disk if not name.startswith(portion)} == set()

    assert info + "licenses/LICENSE" in names
    assert headers["Name"] == folder.name
    assert headers["Version"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert headers["Metadata-Version"] == "2.4"  # some publishers refuse a newer one
