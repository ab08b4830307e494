"""Every example of a docstring does what it says."""

import pytest

from tests.docs import examples, stand_ins

# They train a network, or build one of hundreds of layers.
SLOW = {
    "tfdml.backbones.bn_inception",
    "tfdml.backbones.cutting",
    "tfdml.backbones.googlenet",
    "tfdml.backbones.hub",
    "tfdml.backbones.lora",
    "tfdml.backbones.resnet",
    "tfdml.backbones.resolver",
    "tfdml.backbones.tokens",
    "tfdml.data.augmentation.policies",
    "tfdml.data.batches",
    "tfdml.data.pipeline",
    "tfdml.export.acceptance",
    "tfdml.export.exporter",
    "tfdml.export.request",
    "tfdml.export.saved_model",
    "tfdml.models.ensemble",
    "tfdml.models.learner",
    "tfdml.models.moment_embedder",
    "tfdml.objectives.mutual_information",
    "tfdml.training.experiment",
}
DOCUMENTED = [module for module in examples.MODULES if examples.has_examples(module)]


@pytest.fixture(scope="module")
def names():
    return stand_ins.names()


def _run(module, names, folder, monkeypatch):
    monkeypatch.chdir(folder)
    with stand_ins.short_training(), stand_ins.untrained_exports():
        report = examples.run_docstrings(module, names)
    assert not report, report


@pytest.mark.parametrize("module", [module for module in DOCUMENTED if module not in SLOW])
def test_docstring_examples(module, names, tmp_path, monkeypatch):
    _run(module, names, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("module", sorted(SLOW))
def test_docstring_examples_of_large_networks(module, names, tmp_path, monkeypatch):
    assert module in DOCUMENTED
    _run(module, names, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("want", "got", "same"),
    [
        ("0.25", "0.2512345", True),
        ("0.25", "0.2712345", False),
        ("3", "3", True),
        ("3", "3.2", False),
        ("8.3e-07", "8.318e-07", True),
        ("{'a': 0.5}", "{'a': 0.50000001}", True),
        ("{'a': 0.5}", "{'b': 0.5}", False),
        ("[0.5]", "[0.5, 0.5]", False),
        ("(2, 64)", "TensorShape([2, 64])", False),
    ],
)
def test_numbers_agree_to_the_digits_that_are_printed(want, got, same):
    assert examples.NumberChecker().check_output(want + "\n", got + "\n", 0) is same
