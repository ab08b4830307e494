"""The source archive and the wheel: built, complete, and installed into an empty environment."""

import ast
import configparser
import importlib.metadata
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

import pytest

from tests.docs import world
from tests.docs.pages import blocks
from tests.docs.test_commands import FILES, small_commands
from tfdml.version import __version__

ROOT = pathlib.Path(__file__).resolve().parents[1]
TRACKED = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
).stdout.splitlines()


def _run(*command, cwd):
    """What a command prints that sees nothing of the checkout."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    return done.stdout


def _imports(path):
    """The modules that importing a file imports, those of functions and of TYPE_CHECKING left
    out."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.partition(".")[0]


def test_what_modules_import_is_required_and_pinned():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = [
        re.match(r"[\w-]+", line) for line in setup["options"]["install_requires"].splitlines()
    ]
    required = {name[0].replace("_", "-").lower() for name in listed if name}
    # Clients of databases, Ray and the web framework are extras: these modules are imported where
    # an address names one, and by the command.
    modules = [path for path in (ROOT / "tfdml").rglob("*.py") if path.parent.name != "web"]
    modules = [path for path in modules if not path.name.endswith("_gallery.py")]
    imported = (
        {name for path in modules for name in _imports(path)} - sys.stdlib_module_names - {"tfdml"}
    )
    distributions = importlib.metadata.packages_distributions()
    for name in imported:
        assert required & {found.replace("_", "-").lower() for found in distributions[name]}, name
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert required <= {line.partition("==")[0].replace("_", "-").lower() for line in lines}


def test_links_of_the_long_description_lead_below_the_one_address():
    page = runpy.run_path(str(ROOT / "setup.py"))["readme"]()
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    url, version = settings["metadata"]["url"], __version__
    links = [link for link in re.findall(r"\]\(([^)]+)\)", page) if not link.startswith("#")]
    assert all(link.startswith("https://") for link in links)
    assert f"![Five characters and the nearest images of each]({url}/raw/v{version}/docs/" in page
    ours = [link for link in links if link.startswith(url)]
    assert len(ours) > 20
    for link in ours:
        path = re.fullmatch(rf"{re.escape(url)}/(?:blob|raw)/v{version}/([^#]+)(#.*)?", link)[1]
        assert (ROOT / path).exists(), link


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """(source archive, wheel made of it), from the files of the tree."""
    pytest.importorskip("build", reason="pip install 'tfdml[dev]'")
    if not TRACKED:
        pytest.skip("not a checkout")
    out = tmp_path_factory.mktemp("dist")
    tree = tmp_path_factory.mktemp("tree")
    for name in TRACKED:
        if name.startswith(("tfdml/", "configs/", "export/", "tools/")) or "/" not in name:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    # As `make docs` writes it.
    (tree / "site").mkdir()
    (tree / "site" / "index.html").write_text("the first page")
    _run(sys.executable, "-m", "build", "--outdir", str(out), cwd=tree)
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


@pytest.mark.slow
def test_the_archives_hold_the_whole_package_and_the_wheel_no_tools(archives):
    source, wheel = archives
    needed = {name for name in TRACKED if name.startswith("tfdml/")}
    configs = {name for name in TRACKED if name.startswith("configs/")}
    with zipfile.ZipFile(wheel) as opened:
        assert needed | {f"tfdml/{name}" for name in configs} <= set(opened.namelist())
        assert {"tfdml/site/index.html", "tfdml/serving/client.py"} <= set(opened.namelist())
        folders = {name.partition("/")[0].partition("-")[0] for name in opened.namelist()}
        assert folders == {"tfdml"}
    with tarfile.open(source) as opened:
        assert needed | configs <= {name.partition("/")[2] for name in opened.getnames()}


@pytest.fixture(scope="module")
def environment(archives, tmp_path_factory):
    """An environment that holds the wheel alone; what tfdml depends on comes from that of the
    tests, behind it."""
    folder = tmp_path_factory.mktemp("installed") / "environment"
    _run(sys.executable, "-m", "venv", str(folder), cwd=folder.parent)
    python = folder / "bin" / "python"
    _run(
        str(python),
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        str(archives[1]),
        cwd=folder.parent,
    )
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(environment, tmp_path):
    program = (
        "import tfdml, tfdml.report, tfdml.training\n"
        "from importlib import resources\n"
        "assert resources.files('tfdml').joinpath('py.typed').is_file()\n"
        "assert any(resources.files('tfdml.report').joinpath('templates').iterdir())\n"
        "print(tfdml.__file__, tfdml.__version__)\n"
    )
    python, command = environment / "bin" / "python", environment / "bin" / "tfdml"
    assert pathlib.Path(
        _run(str(python), "-I", "-c", program, cwd=tmp_path).split()[0]
    ).is_relative_to(environment)
    assert "configs/sop_rankmi.flags" in _run(str(command), "configs", "sop", cwd=tmp_path)
    pages = pathlib.Path(_run(str(command), "docs", "--path", cwd=tmp_path).strip())
    assert (pages / "index.html").read_text() == "the first page"
    _run(str(command), "export", "--examples=serving", cwd=tmp_path)
    assert (tmp_path / "serving" / "client.py").is_file()


# One process for all: TensorFlow takes longer to import than most of them to run.
COMMANDS = """
import json, sys
from tfdml import cli
for words in json.loads(sys.argv[1]):
    try:
        cli.main(words)
    except SystemExit as end:
        assert end.code == 0, words
"""


@pytest.mark.slow
def test_the_commands_of_readme_run_as_installed(environment, tmp_path):
    world.write_named(FILES, tmp_path)
    python = str(environment / "bin" / "python")
    _run(python, "-I", "-c", COMMANDS, json.dumps(small_commands("README.md")), cwd=tmp_path)


@pytest.mark.slow
def test_the_first_example_of_readme_learns_as_installed(environment, tmp_path):
    code = next(block.code for block in blocks(ROOT / "README.md") if block.language == "python")
    (tmp_path / "example.py").write_text(
        f"{code}\nassert tfdml.__file__ != {str(ROOT / 'tfdml/__init__.py')!r}\n"
    )
    python = str(environment / "bin" / "python")
    told = _run(python, "-I", str(tmp_path / "example.py"), cwd=tmp_path)
    assert float(re.findall(r"val_recall@1: ([\d.]+)", told)[-1]) >= 0.3
