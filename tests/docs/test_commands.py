"""Every command line of README, docs and the commands' own help has flags that exist, have an
effect, and take their values; those of the pages that a new user follows run."""

import re
import sys
import types

import pytest

from tests.backbones.hub_networks import preset
from tests.cli import commands
from tests.docs import installed
from tests.docs.pages import PAGES, ROOT, blocks, command_lines
from tfdml.io import files
from tfdml.objectives.terms import build_objectives
from tfdml.registry import VARIABLE

_OBJECTIVES = re.compile(r"--objectives=(?P<quote>['\"])(?P<text>.+?)(?P=quote)")


def test_command_lines_parse(monkeypatch):
    """Of a whole command line every flag must have an effect; what `--objectives` names is
    built."""
    monkeypatch.setattr(files, "in_store", lambda path: False)
    monkeypatch.setenv(VARIABLE, "")  # what is named here is not for other tests
    own = types.ModuleType("my_own")
    exec(blocks(ROOT / "docs" / "adding_your_own.md")[0].code, vars(own))
    monkeypatch.setitem(sys.modules, "my_own", own)
    lines = command_lines()
    for page in PAGES:
        for match in _OBJECTIVES.finditer(page.read_text()):
            lines.append((page.name, "train", [f"--objectives={match['text']}"], False))
    assert len(lines) > 60
    faults = []
    for where, name, words, whole in lines:
        command = commands.load(name)
        try:
            (command.parse if whole else command.flags.parse)(words)
            if name == "train" and command.flags.objectives:
                build_objectives(command.flags.objectives, num_classes=4)
        except Exception as error:
            faults.append(f"{where}: {name} {words}: {error}")
    assert not faults, "\n".join(faults)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run, which pages start from."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    words = ["train", "--flagfile=configs/quickstart.flags", f"--run_dir={folder}"]
    commands.printed(*installed.made_small(words))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", installed.PAGES)
def test_the_commands_of_a_page_run(page, finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    installed.write_files(tmp_path)
    preset(tmp_path / "presets" / "dinov2_small", "dinov2")
    for name in ("cars", "cars_jrd"):
        (tmp_path / "runs").mkdir(exist_ok=True)
        (tmp_path / "runs" / name).symlink_to(finished, target_is_directory=True)
    for words in installed.commands(page):
        commands.printed(*(word.replace("/data/galleries", str(tmp_path)) for word in words))
