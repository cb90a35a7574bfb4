"""Each wheel, installed alone beside the third-party packages only, imports and runs its README's snippet."""

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("chunk_recur", "offload", "paged_kv", "sparse_pages")
PACKAGES = (*PARTS, "oomb")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    """One wheel per package, built from its own folder."""
    folder = tmp_path_factory.mktemp("wheels")
    built = {}
    for package in PACKAGES:
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder / package)]
        done = subprocess.run([*command, str(ROOT / "packages" / package)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        (built[package],) = (folder / package).glob("*.whl")
    return built


def install(target: Path, *wheels: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    command += ["--disable-pip-version-check", "--target", str(target), *map(str, wheels)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def run_beside(target: Path, code: str) -> str:
    """Run code where `target` and third-party packages can be imported, but not this project's editable installs.

    Without site (-S) no .pth file is read, and editable installs are .pth files.
    """
    path = os.pathsep.join([str(target), sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=target, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def snippet(package: str) -> str:
    """All Python blocks of the package's README, as one program."""
    text = (ROOT / "packages" / package / "README.md").read_text(encoding="utf-8")
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


@pytest.mark.slow
@pytest.mark.parametrize("package", PARTS)
def test_a_part_works_alone(wheels, tmp_path, package):
    install(tmp_path, wheels[package])
    others = [name for name in PACKAGES if name != package]
    run_beside(
        tmp_path,
        f"""
import importlib.util, pathlib, sys
assert not any(importlib.util.find_spec(name) for name in {others}), "not alone"
import {package}
assert pathlib.Path({package}.__file__).is_relative_to({str(tmp_path)!r}), {package}.__file__
{snippet(package)}
assert not set({others}) & set(sys.modules)
assert "transformers" not in sys.modules
""",
    )


@pytest.mark.slow
def test_the_trainer_works_on_its_four_parts(wheels, tmp_path):
    install(tmp_path, *wheels.values())
    run_beside(
        tmp_path,
        f"""
import pathlib
import oomb, chunk_recur, offload, paged_kv, sparse_pages
for module in (oomb, chunk_recur, offload, paged_kv, sparse_pages):
    assert pathlib.Path(module.__file__).is_relative_to({str(tmp_path)!r}), module.__file__
{snippet("oomb")}
from oomb.cli.train import demo_settings
assert demo_settings()["context"] >= 16384
""",
    )
    (entry,) = tmp_path.glob("oomb-*.dist-info/entry_points.txt")
    assert "oomb = oomb.cli.main:main" in entry.read_text(encoding="utf-8")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_holds_the_package_its_types_and_its_readme(wheels, package):
    with zipfile.ZipFile(wheels[package]) as wheel:
        names = set(wheel.namelist())
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        description = wheel.read(about).decode()
    source = ROOT / "packages" / package / "src"
    expected = {p.relative_to(source).as_posix() for p in source.rglob("*") if p.is_file() and p.suffix != ".pyc"}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert f"{package}/py.typed" in names
    assert "Requires-Python: >=3.10" in description and "```python" in description
