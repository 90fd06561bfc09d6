"""The installed package: the content of the wheel, and its dependencies."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import equipoise

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# The modules that the extras install.
EXTRAS = (
    "flwr",
    "transformers",
    "matplotlib",
    "nibabel",
    "h5py",
    "PIL",
    "ray",
    "mlflow",
    "tensorboard",
    "fairlearn",
)
BUILD = "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"


def run(*command, cwd, **environment):
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    ended = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=kept | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Build both distributions like ``make dist``, from a copy of the project's files."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    shutil.copytree(
        ROOT / "equipoise", tree / "equipoise", ignore=shutil.ignore_patterns("__pycache__")
    )
    run(sys.executable, "-c", BUILD, cwd=tree)
    return tree / "dist"


@pytest.fixture(scope="module")
def installed(dist, tmp_path_factory):
    """The programs of a new environment with the wheel and this environment's dependencies."""
    place = tmp_path_factory.mktemp("environment") / "venv"
    run(sys.executable, "-m", "venv", place, cwd=place.parent)
    (wheel,) = dist.glob("*.whl")
    run(
        place / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=place.parent,
    )
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return place / "bin"


def test_the_distributions_are_built_as_make_dist_does():
    assert BUILD in (ROOT / "Makefile").read_text()


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(dist):
    (wheel,) = dist.glob("*.whl")
    there = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("equipoise/")}
    tree = ROOT / "equipoise"
    own = {
        path.relative_to(ROOT).as_posix()
        for path in tree.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert there == own
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert own | {"pyproject.toml", "LICENSE", "README.md"} <= names


@pytest.mark.slow
def test_the_wheel_alone_runs_the_demo_and_the_commands(installed, tmp_path):
    command = installed / "equipoise"
    where = run(
        installed / "python", "-c", "import equipoise; print(equipoise.__file__)", cwd=tmp_path
    ).strip()
    assert Path(where).is_relative_to(installed.parent)
    assert run(command, "--version", cwd=tmp_path).strip() == equipoise.__version__
    assert {"fedavg", "fednova"} <= {
        row["name"] for row in json.loads(run(command, "methods", "--json", cwd=tmp_path))
    }
    assert "training.schedule.warmup" in run(command, "explain", "training.schedule", cwd=tmp_path)
    small = ("--seed", "0", "--set", "training.rounds=2", "--json")
    results = json.loads(run(command, "compare", "demo", *small, cwd=tmp_path))
    assert results["failures"] == {}
    assert {row["method"] for row in results["results"]} == {
        "fedavg",
        "local",
        "central",
        "fedbn",
        "ditto",
    }
    assert Path(tmp_path, results["report"]).exists()


@pytest.mark.slow
def test_the_examples_of_the_readme_run_with_the_wheel(installed, tmp_path):
    shutil.copy(ROOT / "README.md", tmp_path / "README.md")
    program = (
        "import doctest, sys; failed, tried = doctest.testfile('README.md', module_relative=False, "
        "optionflags=doctest.NORMALIZE_WHITESPACE); sys.exit(failed or tried < 5)"
    )
    # Doctest searches files from the directory of the program, which -c does not have.
    (tmp_path / "examples.py").write_text(program)
    run(installed / "python", "examples.py", cwd=tmp_path)


@pytest.mark.slow
def test_extras_are_imported_only_when_they_are_used():
    """All modules that a run, a study, a report and the command line import by default."""
    program = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {EXTRAS!r}: raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from equipoise.cli.show import federation, keys, methods, run, study\n"
        "import equipoise.report, equipoise.config, equipoise.study, equipoise.explain\n"
        "from equipoise import data, methods, models\n"
        "for name in methods.names(): methods.build(name)\n"
        "for name in data.SOURCES: data.recipe_of(name)\n"
        "for name in models.MODELS: models.maker_of(name)\n"
    )
    run(sys.executable, "-c", program, cwd=ROOT)


def test_versions_and_licence_are_declared():
    project = PROJECT["project"]
    assert project["version"] == equipoise.__version__
    assert project["requires-python"] == ">=3.11"
    declared = {
        line.rpartition(" ")[2]
        for line in project["classifiers"]
        if line.startswith("Programming Language")
    }
    assert declared == {"3.11", "3.12", "3.13"}


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_code_compiles_without_warnings(version):
    """With the available interpreters, which need not have PyTorch."""
    python = shutil.which(f"python{version}")
    if (
        python is None
        or subprocess.run([python, "--version"], capture_output=True, check=False).returncode
    ):
        pytest.skip(f"there is no Python {version}")
    program = (
        "import sys, pathlib, warnings\n"
        "warnings.simplefilter('error')\n"
        "for path in pathlib.Path('equipoise').rglob('*.py'): "
        "compile(path.read_text(encoding='utf-8'), path, 'exec')\n"
    )
    run(python, "-c", program, cwd=ROOT)
