"""Trains, saves, loads and measures where nothing that only the platform needs can be imported.

python -m tests.support.mathematics_alone
"""

import pathlib
import sys
import tempfile

#: What the platform reads, writes, serves and draws with.
PLATFORM = {
    "PIL",
    "faiss",
    "filelock",
    "fsspec",
    "jinja2",
    "lancedb",
    "matplotlib",
    "pooch",
    "psutil",
    "pyarrow",
    "ray",
    "sklearn",
    "starlette",
    "tensorboard",
    "threadpoolctl",
    "uvicorn",
}


class Absent:
    """A finder of modules by which these cannot be found."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in PLATFORM:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def main():
    sys.meta_path.insert(0, Absent)
    import keras
    import numpy as np

    import tfdml
    from tfdml import evaluation, losses, models, objectives

    keras.utils.set_random_seed(0)
    images = np.random.default_rng(0).integers(0, 256, (16, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(16) // 4
    embedder = models.Embedder("conv4", embedding_dim=8, image_size=32)
    learner = models.MetricLearner(
        embedder,
        [losses.TripletLoss(margin=0.1), objectives.ProxyLoss(losses.AMSoftmaxLoss(), 4)],
    )
    learner.compile("adam")
    assert np.isfinite(learner.train_on_batch(images, labels, return_dict=True)["loss"])
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "embedder.keras"
        embedder.save(path)
        loaded = keras.saving.load_model(path)
    vectors = np.asarray(embedder(images))
    np.testing.assert_array_equal(np.asarray(loaded(images)), vectors)
    measures = evaluation.evaluate_retrieval(vectors, labels, metrics=["recall", "map@r"])
    assert 0 <= measures["recall@1"] <= 1
    print(f"tfdml {tfdml.__version__} trains without {', '.join(sorted(PLATFORM))}")


if __name__ == "__main__":
    main()
