"""The source archive and the wheel: built, complete, and installed into an empty environment."""

import ast
import configparser
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

import pytest

from tfdml_command import STAGES

ROOT = pathlib.Path(__file__).resolve().parents[1]
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()


def _run(*command, cwd, **options):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False, **options)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    return done.stdout


def test_every_package_of_the_tree_has_an_init():
    # `packages = find:` leaves out a folder without one, and a checkout would not notice.
    folders = {path.parent for path in (ROOT / "tfdml").rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]


def test_every_command_is_installed_under_its_name():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    points = dict(line.split(" = ") for line in setup["options.entry_points"]["console_scripts"].strip().splitlines())
    assert points == {"tfdml": "tfdml_command:main"}
    assert {path.name for path in (ROOT / "bin").iterdir() if path.name[0] != "_"} == {"tfdml", *STAGES}


def test_constraints_name_every_tool_that_lint_and_docs_run():
    pinned = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().split()}
    assert {"ruff", "mypy", "import-linter", "build", "mkdocs-material", "mkdocstrings", "pytest"} <= pinned


def _imports(path):
    """The modules that importing a file imports, those of functions and of TYPE_CHECKING left out."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.partition(".")[0]


def test_what_modules_import_is_required_and_pinned():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = [re.match(r"[\w-]+", line) for line in setup["options"]["install_requires"].splitlines()]
    required = {name[0].replace("_", "-").lower() for name in listed if name}
    # The clients of databases are extras: these modules are imported where an address names one.
    packages = (ROOT / "tfdml", ROOT / "tfdml_command")
    found = [path for package in packages for path in package.rglob("*.py")]
    modules = [path for path in found if not path.name.endswith("_gallery.py")]
    imported = (
        {name for path in modules for name in _imports(path)}
        - sys.stdlib_module_names
        - {path.name for path in packages}
    )
    distributions = importlib.metadata.packages_distributions()
    for name in imported:
        assert required & {found.replace("_", "-").lower() for found in distributions[name]}, name
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert required <= {line.partition("==")[0].replace("_", "-").lower() for line in lines}


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """(source archive, wheel made of it), from the files of the tree."""
    pytest.importorskip("build", reason="pip install 'tfdml[dev]'")
    if not TRACKED:
        pytest.skip("not a checkout")
    out = tmp_path_factory.mktemp("dist")
    tree = tmp_path_factory.mktemp("tree")
    for name in TRACKED:
        if name.startswith(("tfdml/", "tfdml_command/", "configs/", "tools/")) or "/" not in name:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    _run(sys.executable, "-m", "build", "--outdir", str(out), cwd=tree)
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


@pytest.mark.slow
def test_the_archives_hold_the_whole_package_and_the_wheel_no_tools(archives):
    source, wheel = archives
    needed = {name for name in TRACKED if name.startswith(("tfdml/", "tfdml_command/"))}
    configs = {name for name in TRACKED if name.startswith("configs/")}
    with zipfile.ZipFile(wheel) as opened:
        assert needed | {f"tfdml/{name}" for name in configs} <= set(opened.namelist())
        folders = {name.partition("/")[0].partition("-")[0] for name in opened.namelist()}
        assert folders == {"tfdml", "tfdml_command"}
        metadata = opened.read(next(name for name in opened.namelist() if name.endswith("METADATA"))).decode()
    with tarfile.open(source) as opened:
        assert needed | configs <= {name.partition("/")[2] for name in opened.getnames()}
    assert "Requires-Python: <3.14,>=3.11" in metadata
    assert "License-Expression: Apache-2.0" in metadata or "License: Apache-2.0" in metadata


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(archives, tmp_path):
    # What it depends on is taken from the environment of the tests, behind the new one's own packages.
    environment = tmp_path / "environment"
    _run(sys.executable, "-m", "venv", str(environment), cwd=tmp_path)
    python = environment / "bin" / "python"
    _run(str(python), "-m", "pip", "install", "--no-deps", "--no-index", str(archives[1]), cwd=tmp_path)
    site = next((environment / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    program = (
        "import tfdml, tfdml.report, tfdml.training\n"
        "from importlib import resources\n"
        "assert resources.files('tfdml').joinpath('py.typed').is_file()\n"
        "assert any(resources.files('tfdml.report').joinpath('templates').iterdir())\n"
        "glyphs = tfdml.data.load('glyphs', split='test', images_per_class=2)\n"
        "print(tfdml.__file__, tfdml.__version__, len(glyphs))\n"
    )
    told = _run(str(python), "-I", "-c", program, cwd=tmp_path).split()
    assert pathlib.Path(told[0]).is_relative_to(environment)
    assert told[2] == "214"
    command, clean = str(environment / "bin" / "tfdml"), {**os.environ}
    clean.pop("PYTHONPATH", None)
    assert "configs/sop_rankmi.flags" in _run(command, "configs", "sop", cwd=tmp_path, env=clean)
    assert "configs/sop_rankmi.flags" in _run(str(python), "-m", "tfdml", "completion", "bash", cwd=tmp_path, env=clean)
    flags = ["--flagfile=configs/quickstart.flags", "--run_dir=runs/x", "--dry_run"]
    assert "horde(loss=multi_similarity" in _run(command, "train", *flags, cwd=tmp_path, env=clean)
