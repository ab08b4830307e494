"""What `import tfdml` offers to people, editors and type checkers."""

import subprocess
import sys

import pytest

import tfdml


def test_dir_offers_every_public_name():
    assert set(tfdml.__all__) <= set(dir(tfdml))
    assert dir(tfdml) == sorted(dir(tfdml))


@pytest.mark.slow
def test_what_needs_tensorflow_or_is_heavy_waits_for_its_first_use():
    lazy = sorted(tfdml._ON_FIRST_USE)
    code = f"import sys, tfdml; dir(tfdml); print([name for name in {lazy} if f'tfdml.{{name}}' in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'tfdml' has no attribute 'dta'"):
        _ = tfdml.dta


TYPED = """import numpy as np
import tfdml

train = tfdml.data.load("glyphs")
reveal_type(train)
own = tfdml.data.ImageDataset(images=np.zeros((1, 8, 8, 3), np.uint8), labels=[0])
tfdml.data.laod("glyphs")
tfdml.evaluation.evaluate_retreival
tfdml.dta
train.class_name
"""


@pytest.mark.slow
def test_a_type_checker_knows_the_packages_of_first_use(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--follow-imports=silent", "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 'user.py:5: note: Revealed type is "tfdml.data.dataset.ImageDataset"' in done.stdout
    errors = [line.partition(": error: ")[0] for line in done.stdout.splitlines() if ": error: " in line]
    assert errors == ["user.py:7", "user.py:8", "user.py:9", "user.py:10"], done.stdout
