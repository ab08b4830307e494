r"""A training step and a small training, compared with PyTorch on the same weights and batches.

    make parity-pml                                        once: makes the environment with PyTorch
    python -m benchmarks.training --data_dir=CARS196 --weights=MNV2_035.weights.h5
    python -m benchmarks.training --data_dir=CARS196 --weights=MNV2_035.weights.h5 \
        --epochs=0    the step alone
    ... --compile    PyTorch's network by torch.compile (needs a C++ compiler)
    python -m benchmarks.training --classes 10000 100000 1000000 \
        --rounds=9    a step by the number of classes, ours
    python -m benchmarks.training --classes 1000000 --rows=1000000     the start of a run

MobileNetV2 alpha 0.35 at 96 px with frozen BatchNorm, 128-d, the contrastive loss (its sum over the
pairs) on 10 classes of 10 images, Adam, the rate a tenth of itself after two thirds:
`configs/small/cars_contrastive.flags`. Both sides read the batches, augmented once, from the disk.
Steps are taken in turns, and a row is their median; then each side trains by itself, and embeds the
classes that it has never seen, which tfdml measures.

The steps by the number of classes are those of AMSoftmax and Adam with 256 images and 512
dimensions, on a network that costs nothing. Each is a process with one thread. A cell is the median
of the processor time of steps in turns, and the highest memory of the process. `dense` compares
with all classes.
"""

import functools
import json
import os
import pathlib
import resource
import statistics
import sys
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf

import tfdml
from benchmarks.timing import Peer, in_turns, time_call
from tfdml.training import build_optimizer, checkpoints, step_schedule
from tools.numbers import Results, command_line

ROOT = pathlib.Path(__file__).resolve().parents[1]
SIZE, RATE, STEPS = 96, 3e-4, 64
# How many classes a step compares with, of how many there are. A dense step of a million exceeds
# the memory of most.
COMPARED = {
    "1,000 drawn": lambda classes: 1000,
    "a tenth drawn": lambda classes: classes // 10,
    "dense": lambda classes: classes if classes <= 100_000 else None,
}


def make_learner(weights, drop_step):
    """Ours, from the same first weights each time."""
    keras.utils.set_random_seed(0)
    backbone = tfdml.backbones.resolve("mobilenetv2", image_size=SIZE, alpha=0.35, weights=weights)
    embedder = tfdml.models.Embedder(backbone, embedding_dim=128, image_size=SIZE, resize=112)
    loss = tfdml.losses.ContrastiveLoss(margin=1, distance="sqeuclidean", reduction="sum")
    learner = tfdml.models.MetricLearner(embedder, loss)
    learner.build((None, SIZE, SIZE, 3))
    learner.compile(build_optimizer("adam", learner, step_schedule(RATE, [drop_step], 0.1)))
    return learner


def write_inputs(folder, arguments, learner, drop_step):
    """What both sides read: see `benchmarks.training_peer`; returns the labels of the test
    images."""
    train, test = (
        tfdml.data.load("cars196", arguments.data_dir, split) for split in ("train", "test")
    )
    view = tfdml.data.TrainTransform("random_crop", resize=112, image_size=SIZE)
    steps = max(arguments.epochs * STEPS, 1)
    batches = iter(tfdml.data.class_balanced(train, 10, 10, view))
    images = np.lib.format.open_memmap(
        folder / "images.npy", "w+", np.uint8, (steps, 100, SIZE, SIZE, 3)
    )
    labels = np.zeros((steps, 100), np.int64)
    for step in range(steps):
        images[step], labels[step] = (np.asarray(part) for part in next(batches))
    np.save(folder / "labels.npy", labels)
    subset = test if arguments.epochs else test.take(np.arange(100))
    view = tfdml.data.evaluation_batches(
        subset, tfdml.data.EvaluationTransform(resize=112, image_size=SIZE), 100
    )
    np.save(folder / "test.npy", np.concatenate([np.asarray(batch) for batch, _ in view]))
    layers = [
        *learner.embedder.backbone._flatten_layers(include_self=False, recursive=True),
        learner.embedder,
    ]
    weights = [
        array
        for layer in layers
        if not getattr(layer, "layers", None)
        for array in layer.get_weights()
    ]
    weights += [keras.ops.convert_to_numpy(variable) for variable in learner.parts()["projection"]]
    np.savez(folder / "weights.npz", *weights)
    (folder / "settings.json").write_text(
        json.dumps({"learning_rate": RATE, "drop_step": drop_step})
    )
    return subset.labels


def learner_of_classes(classes, share):
    """Return a compiled learner whose network costs nothing, on one thread."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    inputs = keras.Input((8, 8, 3))
    backbone = keras.Model(inputs, keras.layers.Conv2D(8, 1)(inputs))
    embedder = tfdml.models.Embedder(backbone, embedding_dim=512, image_size=8)
    objective = tfdml.objectives.ProxyLoss(tfdml.losses.AMSoftmaxLoss(), classes, sample=share)
    learner = tfdml.models.MetricLearner(embedder, [objective])
    learner.build((None, 8, 8, 3))
    learner.compile(build_optimizer("adam", learner, RATE), jit_compile=False)
    return learner


def peak():
    """The highest memory of this process so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def make_steps(classes, share):
    """Make a step for each line of the input; print its processor time and the highest memory so
    far."""
    learner = learner_of_classes(classes, share)
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (256, 8, 8, 3)).astype(np.uint8)
    for _ in sys.stdin:
        labels = generator.integers(0, classes, 256)
        started = time.process_time()
        learner.train_on_batch(images, labels)
        seconds = time.process_time() - started
        print(json.dumps([seconds, peak()]), flush=True)


def by_classes(arguments):
    """Measure steps by the number of classes; those that compare alike take turns."""
    cells = {classes: [f"{classes:,}"] for classes in arguments.classes}
    for number in COMPARED.values():
        peers = {
            classes: start_steps(classes, number(classes)) for classes in cells if number(classes)
        }
        asks = {classes: functools.partial(peer.ask, "step") for classes, peer in peers.items()}
        in_turns(asks, 3)
        memory = {}
        for classes, answers in in_turns(asks, arguments.rounds).items():
            peers[classes].close()
            seconds = statistics.median(seconds for seconds, _ in answers)
            memory[classes] = answers[-1][1]
            cells[classes].append(f"{1000 * seconds:,.0f} ms, {memory[classes]:.1f} GiB")
        for classes in cells.keys() - peers.keys():
            # Memory grows evenly with the number of classes.
            line = np.polyfit(list(memory), list(memory.values()), 1)
            cells[classes].append(f"{np.polyval(line, classes):.1f} GiB, computed")
    row = Results(arguments.json).table("steps", "classes", *COMPARED)
    for measured in cells.values():
        row(*measured)


def start_steps(classes, number):
    """Start a process of `make_steps` that compares with so many of the classes."""
    share = ["--classes", str(classes), "--share", str(number / classes)]
    return Peer([sys.executable, "-m", "benchmarks.training", *share])


def start_up(arguments):
    """Measure what a run does before its first step, and its checkpoints, stage by stage in one
    process."""
    add = Results(arguments.json).table("stages", "stage", "seconds", "GiB so far")
    classes, started = arguments.classes[0], 0.0

    def stage(name, result):
        nonlocal started
        add(name, f"{time.process_time() - started:.1f}", f"{peak():.1f}")
        started = time.process_time()
        return result

    with tempfile.TemporaryDirectory() as scratch:
        file = pathlib.Path(scratch) / "list.csv"
        with file.open("w") as opened:
            opened.write("path,label,split\n")
            opened.writelines(
                f"{row // 1000}/{row}.jpg,{row % classes},train\n" for row in range(arguments.rows)
            )
        # There are no images.
        tfdml.data.readers.splits.require_files = lambda name, paths, advice: tuple(paths)
        started = time.process_time()
        dataset = stage("read the list", tfdml.data.load("list", file))
        dataset = stage("number the classes", dataset.contiguous())
        sampler = tfdml.data.ClassBalancedSampler(dataset.labels, 64, 4)
        stage("class-balanced sampler, 100 batches", [sampler.batch(step) for step in range(100)])
        sampler = tfdml.data.ShuffleSampler(len(dataset), 256)
        stage("shuffled, 100 batches", [sampler.batch(step) for step in range(100)])
        learner = stage("learner", learner_of_classes(classes, 1000 / classes))
        stage(
            "write a checkpoint",
            checkpoints.save(pathlib.Path(scratch), learner, checkpoints.TrainingState(0, [])),
        )
        stage("resume", checkpoints.restore_latest(pathlib.Path(scratch), learner))


def main():
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--data_dir")
    parser.add_argument("--weights")
    parser.add_argument(
        "--classes", type=int, nargs="*", help="measure steps by the number of classes"
    )
    parser.add_argument(
        "--rows", type=int, help="measure the start of a run with a list of so many images"
    )
    parser.add_argument(
        "--share",
        type=float,
        help="make steps on demand that compare with this share of the classes",
    )
    parser.add_argument("--torch_python", default=str(ROOT / ".venv-pml" / "bin" / "python"))
    parser.add_argument("--epochs", type=int, default=12, help=f"of {STEPS} steps")
    parser.add_argument("--rounds", type=int, default=20, help="steps in turns")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--compile", action="store_true", help="PyTorch's network by torch.compile")
    arguments = parser.parse_args()
    if arguments.share:
        return make_steps(arguments.classes[0], arguments.share)
    if arguments.rows:
        return start_up(arguments)
    if arguments.classes:
        return by_classes(arguments)
    if not (arguments.data_dir and arguments.weights):
        parser.error("--data_dir and --weights are needed, or --classes")
    tf.config.threading.set_intra_op_parallelism_threads(arguments.threads)
    drop_step = arguments.epochs * STEPS * 2 // 3
    learner = make_learner(arguments.weights, drop_step)
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        test_labels = write_inputs(folder, arguments, learner, drop_step)
        images, labels = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("images", "labels")
        )
        command = [arguments.torch_python, str(ROOT / "benchmarks" / "training_peer.py"), scratch]
        command += [str(arguments.threads), *["compile"] * arguments.compile]
        peer = Peer(command)

        def step():
            logs, seconds, _ = time_call(
                learner.train_on_batch, np.array(images[0]), labels[0], return_dict=True
            )
            return {"value": float(logs["loss"]), "seconds": seconds}

        sides = {"tfdml": step, "PyTorch": functools.partial(peer.ask, "step")}
        first = {
            name: [step["value"] for step in steps] for name, steps in in_turns(sides, 3).items()
        }
        times = in_turns(sides, arguments.rounds)
        ours, theirs = (
            1000 * statistics.median(step["seconds"] for step in steps) for steps in times.values()
        )
        row = Results(arguments.json).table("table", "", "tfdml", "PyTorch", "ratio")
        row("a step, ms, in turns", f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}")
        print(f"losses of the first steps: {first}", flush=True)
        if arguments.epochs:
            whole(arguments, folder, drop_step, test_labels, peer, row)
        peer.close()


def whole(arguments, folder, drop_step, test_labels, peer, row):
    """Both trainings, one after the other, and what their embeddings find."""
    learner = make_learner(arguments.weights, drop_step)
    images, labels = (
        np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("images", "labels")
    )

    def batches():
        for batch, own in zip(images, labels, strict=True):
            yield np.array(batch), own

    kinds = (tf.TensorSpec((100, SIZE, SIZE, 3), tf.uint8), tf.TensorSpec((100,), tf.int64))
    source = tf.data.Dataset.from_generator(batches, output_signature=kinds).prefetch(2)
    _, ours, _ = time_call(learner.fit, source, epochs=1, verbose=0)
    theirs = peer.ask("train")["seconds"]
    test = np.load(folder / "test.npy")
    embedded = {
        "tfdml": learner.predict(test, batch_size=100, verbose=0),
        "PyTorch": np.load(folder / "theirs.npy"),
    }
    rates = [labels.size / duration for duration in (ours, theirs)]
    row(
        "images a second of the whole training",
        *(f"{rate:,.0f}" for rate in rates),
        f"{rates[0] / rates[1]:.2f}",
    )
    found = [
        tfdml.evaluation.evaluate_retrieval(vectors, test_labels) for vectors in embedded.values()
    ]
    for metric, name in (("recall@1", "Recall@1 on the unseen classes"), ("map@r", "MAP@R")):
        row(name, *(f"{100 * values[metric]:.1f}" for values in found), "")


if __name__ == "__main__":
    main()
