"""Train images and texts from scratch, or texts next to stored vectors of images, and measure both directions.

    python -m benchmarks.texts glyphs
    python -m benchmarks.texts cars --data_dir=CARS196 --weights=MNV2_035_NOTOP.weights.h5
    python -m benchmarks.texts cars --data_dir=CARS196 --weights=MNV2_035_NOTOP.weights.h5 --preset=MINILM

`glyphs` trains both towers on the letters of `glyphs(texts=True)`. `cars` embeds Cars-196 once by MobileNetV2 (0.35,
96 px, ImageNet), and trains a projection of these vectors and a tower of bytes on the names of the first 98 classes.
With `--preset`, a preset of KerasHub embeds the names, and a projection of its vectors takes the place of the bytes.
The test classes were not trained on. Results go to benchmarks/results/texts_NAME.json.
"""

import argparse
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdml
from tfdml.backbones import load_text_preset
from tfdml.data import ClassBalancedSampler, EvaluationTransform, ImageDataset, evaluation_batches
from tfdml.embeddings.files import class_of_each
from tfdml.evaluation import embed, evaluate_views
from tfdml.evaluation.views import ViewItems
from tfdml.models import ByteTokenizer, Embedder, Head, MetricLearner, TextEmbedder, byte_encoder
from tfdml.objectives import SoftmaxAcrossViews

Encode = Callable[[list[str]], np.ndarray]
RESULTS = pathlib.Path(__file__).parent / "results"
DIM, LENGTH = 128, 64


def pixels(split: str) -> tuple[ImageDataset, np.ndarray]:
    """Letters of 32 px with their names, and the images themselves."""
    dataset = tfdml.data.load(
        "glyphs", split=split, texts=True, size=32, images_per_class=20 if split == "train" else 10
    )
    return dataset, dataset.images.data


def vectors(data_dir: str, weights: str) -> Iterator[tuple[ImageDataset, np.ndarray]]:
    """Cars of both splits, and the pooled features of one MobileNetV2."""
    backbone = tfdml.backbones.resolve("mobilenetv2", 96, weights=weights, alpha=0.35)
    embedder = Embedder(backbone, embedding_dim=0, image_size=96, resize=112)
    for split in ("train", "test"):
        dataset = tfdml.data.load("cars196", data_dir, split)
        yield dataset, embed(embedder, evaluation_batches(dataset, EvaluationTransform.of(embedder), 100))


def train(
    image: Embedder, text: Head, encode: Encode, dataset: ImageDataset, inputs: np.ndarray, steps: int, classes: int
) -> None:
    """Train both towers on batches of one image of each class drawn."""
    names, rows_of_names = np.unique(class_of_each(dataset.labels, dataset.class_names), return_inverse=True)
    tokens, labels = encode(names.tolist())[rows_of_names], dataset.contiguous().labels
    sampler = ClassBalancedSampler(labels, classes_per_batch=classes, images_per_class=1, seed=0)

    def batches():
        for step in range(steps):
            rows = sampler.batch(step)
            yield {"image": inputs[rows], "text": tokens[rows]}, labels[rows]

    views = {"image": inputs, "text": tokens}
    spec = {name: tf.TensorSpec((classes, *view.shape[1:]), view.dtype) for name, view in views.items()}
    signature = spec, tf.TensorSpec((classes,), tf.int64)
    learner = MetricLearner({"image": image, "text": text}, SoftmaxAcrossViews())
    learner.compile(keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.001, steps)))
    data = tf.data.Dataset.from_generator(batches, output_signature=signature).prefetch(2)
    learner.fit(data, steps_per_epoch=steps // 4, epochs=4, verbose=2)


def main() -> None:
    """Train, measure, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=("glyphs", "cars"))
    parser.add_argument("--data_dir", default="")
    parser.add_argument("--weights", default="imagenet")
    parser.add_argument("--steps", type=int, default=0, help="in place of the usual; no result is then written")
    parser.add_argument("--preset", default="", help="of KerasHub: embeds the names of the cars, in place of bytes")
    arguments = parser.parse_args()
    start = time.time()
    keras.utils.set_random_seed(0)
    text: Any = TextEmbedder(byte_encoder(LENGTH, width=32), ByteTokenizer(LENGTH), embedding_dim=DIM)
    encode = text.tokenize
    if arguments.preset:
        encode = TextEmbedder(*load_text_preset(arguments.preset, length=32), embedding_dim=0).embed_texts
        text = Head(encode(["a car"]).shape[1], embedding_dim=DIM)
    if arguments.name == "glyphs":
        (dataset, inputs), (test, unseen) = pixels("train"), pixels("test")
        backbone = tfdml.backbones.resolve("conv4", 32, width=32)
        image, steps = Embedder(backbone, DIM, image_size=32, resize=32, batch_norm="train"), 1400
    else:
        (dataset, inputs), (test, unseen) = vectors(arguments.data_dir, arguments.weights)
        image, steps = Head(inputs.shape[1], embedding_dim=DIM), 600
    train(image, text, encode, dataset, inputs, arguments.steps or steps, min(128, dataset.num_classes))
    items = ViewItems.of(test)
    images = embed(image, [unseen[first : first + 100] for first in range(0, len(unseen), 100)])[items.rows]
    texts = text.predict(encode(items.texts), verbose=0)
    result = evaluate_views(images, texts, items.image_labels, items.text_labels)
    for direction, measures in result.items():
        for name in ("recall@1", "recall@10", "map"):
            print(direction, name, measures[name], measures["intervals"][name], measures["chance"].get(name))
    print(f"{time.time() - start:.0f} s")
    if not arguments.steps:
        path = RESULTS / f"texts_{arguments.name}{'_preset' * bool(arguments.preset)}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
