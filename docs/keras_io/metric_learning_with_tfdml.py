"""
Title: Metric learning for unseen classes
Author: The tfdml authors
Date created: 2026/11/29
Last modified: 2026/11/29
Description: Train embeddings on five classes of CIFAR-10, and search and classify five others.
Accelerator: GPU
"""

"""
## Overview

Metric learning trains a network whose outputs are near each other for images of one
class. Search and classification then work on classes that the network has not seen:
compare a new image with stored embeddings. A new class needs a few images, and no
training.

This example uses [tfdml](https://pypi.org/project/tfdml), a library of losses, metrics
and tools for metric learning on Keras 3. The code runs on TensorFlow, JAX and PyTorch.

We train on five classes of CIFAR-10 and measure on the other five. A result on trained
classes would not show how well the network works on new ones.
"""

"""
## Setup
"""

"""shell
pip install -q tfdml
"""

import keras
import matplotlib.pyplot as plt
import numpy as np
import tfdml

keras.utils.set_random_seed(0)

"""
## Data

The first five classes are trained on. The others stay unseen.
"""

(x_train, y_train), (x_test, y_test) = keras.datasets.cifar10.load_data()
y_train, y_test = y_train[:, 0], y_test[:, 0]
names = "airplane automobile bird cat deer dog frog horse ship truck".split()

x_seen, y_seen = x_train[y_train < 5], y_train[y_train < 5]
x_unseen, y_unseen = x_test[y_test >= 5], y_test[y_test >= 5]
print(f"{len(x_seen):,} images to train on, {len(x_unseen):,} of unseen classes")

"""
## Batches

A loss over pairs learns from images of one class in the same batch. Each batch has five
classes and 20 images of each.
"""

sampler = tfdml.data.ClassBalancedSampler(
    y_seen, classes_per_batch=5, images_per_class=20
)
batches = tfdml.data.ArrayBatches(x_seen, y_seen, sampler)

"""
## Model

Any Keras model will do whose output is one vector of length 1 for each image.
"""

model = keras.Sequential([keras.Input((32, 32, 3)), keras.layers.Rescaling(1 / 255)])
for filters in (32, 64, 128):
    model.add(keras.layers.Conv2D(filters, 3, padding="same", use_bias=False))
    model.add(keras.layers.BatchNormalization())
    model.add(keras.layers.ReLU())
    model.add(keras.layers.MaxPooling2D())
model.add(keras.layers.GlobalAveragePooling2D())
model.add(keras.layers.Dense(64))
model.add(keras.layers.UnitNormalization())

"""
## Training

`RetrievalEvaluation` adds two metrics of the unseen classes to the logs of each epoch.
Recall@1 is the share of images whose nearest image is of their class. MAP@R also looks
at the order of all images of the class.
"""

evaluation = tfdml.callbacks.RetrievalEvaluation(x_unseen, y_unseen)
before = evaluation.evaluate(model)["recall@1"]
model.compile(keras.optimizers.Adam(1e-3), loss=tfdml.losses.MultiSimilarityLoss())
history = model.fit(
    batches, epochs=10, shuffle=False, callbacks=[batches, evaluation]
).history
after = history["val_recall@1"][-1]
print(f"Recall@1 on unseen classes: {before:.3f} untrained, {after:.3f} trained")

plt.plot(history["val_recall@1"])
plt.xlabel("epoch")
plt.ylabel("Recall@1 on unseen classes")
plt.show()

"""
## The nearest images

Each row is an image of an unseen class and its five nearest images.
"""

embeddings = model.predict(x_unseen, verbose=0)
neighbors, distances = tfdml.retrieval.nearest_neighbors(embeddings, k=5)

figure, axes = plt.subplots(5, 6, figsize=(6, 5))
for row, label in zip(axes, range(5, 10)):
    query = np.flatnonzero(y_unseen == label)[0]
    for axis, index in zip(row, [query, *neighbors[query]]):
        axis.imshow(x_unseen[index])
        axis.set_title(names[y_unseen[index]], fontsize=7)
        axis.axis("off")
plt.show()

"""
## An index that answers "unknown"

The index holds half of the images of four unseen classes. The fifth is new to it, so
its images should be called unknown. `calibrate` chooses the distance within which at
most a tenth of the images of unknown classes find anything.
"""

is_stored = (y_unseen != 9) & (np.arange(len(y_unseen)) % 2 == 0)
index = tfdml.Index(model)
index.add(
    x_unseen[is_stored],
    y_unseen[is_stored],
    class_names=dict(enumerate(names)),
)
index.calibration = index.calibrate(fpir=0.1)
print(index.calibration)

answers = index.classify(x_unseen[~is_stored]).labels
labels = np.array(names)[y_unseen[~is_stored]]
is_known = labels != "truck"
right = np.mean(answers[is_known] == labels[is_known])
unknown = np.mean(answers[~is_known] == "unknown")
print(f"known classes named right: {right:.2f}; trucks called unknown: {unknown:.2f}")

"""
## Add a class

A few images of trucks make them known. Nothing is trained again.
"""

trucks = x_unseen[y_unseen == 9]
ids = [f"truck {number}" for number in range(100)]
index.add(trucks[:100], np.full(100, 9), ids, class_names=dict(enumerate(names)))
answers = index.classify(trucks[100:]).labels
print(f"trucks named right: {np.mean(answers == 'truck'):.2f}")

"""
## Further reading

- Wang et al., [Multi-Similarity Loss](https://arxiv.org/abs/1904.06627), CVPR 2019.
- Musgrave et al., [A Metric Learning Reality Check](https://arxiv.org/abs/2003.08505),
  ECCV 2020.
"""
