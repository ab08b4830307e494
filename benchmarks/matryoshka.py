"""Recall@1 of embeddings that are cut to their first dimensions, trained as a Matryoshka or not.

    tfdml train --flagfile=configs/small/cars_contrastive.flags --data_dir=CARS196 --weights=MNV2_035.weights.h5 \
        --embedding_dim=0 --epochs=0 --drop_epochs= --selection=last --holdout_classes=0 --run_dir=runs/features
    tfdml embed --model=runs/features --split=all --out=embeddings/features
    python -m benchmarks.matryoshka --features=embeddings/features --json=matryoshka.json

Trains linear heads on the features of the training classes: of 128 dimensions by the loss alone, of 128 by the sum over
prefixes, and of 32 by the loss alone. The unseen classes are measured after the last epoch, at every number of
dimensions. The differences at 32 dimensions have 95 % intervals over classes, seeds averaged.
"""

import keras
import numpy as np

from tfdml.data import ArrayBatches, ClassBalancedSampler
from tfdml.embeddings import read_embeddings
from tfdml.embeddings.compute import truncate
from tfdml.evaluation import paired_differences, retrieval_per_query
from tfdml.layers import L2Normalize
from tfdml.losses import MultiSimilarityLoss
from tfdml.objectives import Matryoshka
from tools.numbers import Results, command_line

SHORT, DIMS = 32, [32, 64, 128]
ROWS = {"plain": [128], "matryoshka": DIMS, f"plain, head of {SHORT}": [SHORT]}
METRICS = ("recall@1", "map@r")


class Summed(keras.losses.Loss):
    """An objective on the embedding as a loss of `compile`."""

    def __init__(self, objective):
        super().__init__()
        self.objective = objective

    def call(self, y_true, y_pred):
        """Compute the objective's value."""
        return self.objective({"embedding": y_pred}, keras.ops.reshape(y_true, (-1,)))


def trained_head(x, y, dims, epochs, seed):
    """Return a linear head, trained on prefixes of these lengths."""
    keras.utils.set_random_seed(seed)
    head = keras.Sequential([keras.Input((x.shape[1],)), keras.layers.Dense(dims[-1]), L2Normalize()])
    head.compile(keras.optimizers.Adam(1e-3), loss=Summed(Matryoshka(MultiSimilarityLoss(), dims)))
    sampler = ClassBalancedSampler(y, classes_per_batch=20, images_per_class=5, seed=seed)
    head.fit(ArrayBatches(x, y, sampler), epochs=epochs, verbose=0)
    return head


def main():
    """Train, measure, and write the result."""
    parser = command_line(__doc__)
    parser.add_argument("--features", required=True, help="folder of tfdml embed, with both splits")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    stored = read_embeddings(arguments.features)
    train, test = stored.split("train"), stored.split("test")
    values = {(name, dim): [] for name, lengths in ROWS.items() for dim in DIMS if dim <= lengths[-1]}
    for seed in range(arguments.seeds):
        for name, lengths in ROWS.items():
            head = trained_head(np.asarray(train.embeddings), train.labels, lengths, arguments.epochs, seed)
            vectors = head.predict(np.asarray(test.embeddings), batch_size=1000, verbose=0)
            for dim in (dim for dim in DIMS if (name, dim) in values):
                values[name, dim].append(
                    retrieval_per_query(truncate(vectors, dim), test.labels, ks=[1], metrics=METRICS)
                )
    results = Results(arguments.json)
    row = results.table("table", "head", "dimensions", "Recall@1, by seed", "mean", "MAP@R")
    for (name, dim), runs in values.items():
        recalls, precisions = ([100 * float(np.nanmean(run[metric])) for run in runs] for metric in METRICS)
        by_seed = " / ".join(f"{value:.1f}" for value in recalls)
        row(name, dim, by_seed, f"{np.mean(recalls):.1f}", f"{np.mean(precisions):.1f}")
    row = results.table("differences", f"`matryoshka` at {SHORT} dimensions less", "Recall@1", "MAP@R")
    for name in ("plain", f"plain, head of {SHORT}"):
        difference = paired_differences(values["matryoshka", SHORT], values[name, SHORT], test.labels)
        parts = ([100 * part for part in difference[metric][:3]] for metric in METRICS)
        row(name, *(f"{mean:+.1f} ({low:+.1f} to {high:+.1f})" for mean, low, high in parts))


if __name__ == "__main__":
    main()
