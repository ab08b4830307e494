"""Every example of a docstring does what it says."""

import contextlib

import pytest

from tests.docs import examples, files, stand_ins

# They train a network, export one, build one of hundreds of layers, start Ray, or read thousands of
# files.
SLOW = {
    "tfdml.backbones.hub",
    "tfdml.backbones.networks",
    "tfdml.backbones.resolver",
    "tfdml.cluster.bulk_embedding",
    "tfdml.cluster.ray_session",
    "tfdml.cluster.training",
    "tfdml.data.pipeline",
    "tfdml.data.policies",
    "tfdml.data.readers.official_archives",
    "tfdml.embeddings.backends",
    "tfdml.embeddings.model_card",
    "tfdml.export.exporter",
    "tfdml.export.conversion",
    "tfdml.export.retriever",
    "tfdml.export.saved_model",
    "tfdml.models.ensemble",
    "tfdml.models.learner",
    "tfdml.models.reduced",
    "tfdml.objectives.mutual_information",
    "tfdml.report.pages",
    "tfdml.training.settings",
    "tfdml.training.build",
}
CONTEXTS = (stand_ins.short_training, stand_ins.untrained_exports, files.as_many_images)
DOCUMENTED = [module for module in examples.MODULES if examples.has_examples(module)]


@pytest.fixture(scope="module")
def names():
    return stand_ins.names()


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("kept")


@pytest.mark.parametrize(
    "module", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in DOCUMENTED]
)
def test_docstring_examples(module, names, kept, tmp_path, monkeypatch):
    files.write_named(files.examples_of(module), tmp_path, names, kept)
    monkeypatch.chdir(tmp_path)
    with contextlib.ExitStack() as stack:
        for context in CONTEXTS:
            stack.enter_context(context())
        report = examples.run_docstrings(module, names)
    assert not report, report
