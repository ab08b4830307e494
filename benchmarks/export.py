r"""Latency, throughput and size of an exported version, compared with the Keras embedder it comes
from.

    tfdml export --run_dir=runs/cars --out=models/cars --formats=all
    python -m benchmarks.export --run_dir=runs/cars --model=models/cars/1
    python -m benchmarks.export --run_dir=runs/cars --model=models/cars/1 --rounds=3 \
        --calls=5    a quick try

Two tables. From encoded images: the SavedModel's `serving_default`, and Keras as one would call it
by hand, the same view made in a `tf.function`, then `predict_on_batch`. From views (uint8, after
resizing and the crop), where decoding costs nothing: `predict_on_batch`, LiteRT in each precision,
ONNX. All contenders take turns, for some rounds, in one process; a number is the median of the
rounds. LiteRT and ONNX use as many threads as there are cores, as TensorFlow does. `tfdml export`
compares the embeddings, and `tfdml evaluate --model` measures what they find.
"""

import functools
import os
import pathlib
import statistics
import time

from benchmarks.timing import in_turns
from tools.numbers import Results, command_line

BATCH = 32


def interpreter(path):
    """The function of a .tflite file from views to embeddings."""
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError:
        import tensorflow as tf

        Interpreter = tf.lite.Interpreter
    # One for each batch size, so that none is resized while the clock runs.
    runners = {}

    def embed(views):
        if len(views) not in runners:
            runners[len(views)] = Interpreter(
                model_path=str(path), num_threads=os.cpu_count()
            ).get_signature_runner()
        return runners[len(views)](images=views)["embedding"]

    return embed


def onnx_session(path):
    """The function of an ONNX file from views to embeddings."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda views: session.run(["embedding"], {"images": views})[0]


def keras_from_bytes(embedder):
    """Keras from encoded images, as one would write it."""
    import tensorflow as tf

    from tfdml.data import decode_image
    from tfdml.data.transforms import EvaluationTransform

    transform = EvaluationTransform.of(embedder)
    spec = tf.TensorSpec((transform.image_size, transform.image_size, 3), tf.uint8)

    @tf.function(input_signature=[tf.TensorSpec((None,), tf.string)])
    def views(image_bytes):
        return tf.map_fn(
            lambda text: transform(decode_image(text)), image_bytes, fn_output_signature=spec
        )

    return lambda images: embedder.predict_on_batch(views(tf.constant(images)))


def saved_model(path):
    """The SavedModel from encoded images."""
    import tensorflow as tf

    loaded = tf.saved_model.load(str(path))
    serve = loaded.signatures["serving_default"]
    return lambda images, loaded=loaded: serve(image_bytes=tf.constant(images))["embedding"].numpy()


def contenders(embedder, version):
    """By table, then by name: the function, and the bytes of what is shipped."""
    graph = [version / "saved_model.pb", *(version / "variables").glob("*")]
    from_bytes = {
        "Keras by hand: decode in a `tf.function`, `predict_on_batch`": (
            keras_from_bytes(embedder),
            None,
        )
    }
    if graph[0].is_file():
        from_bytes["SavedModel"] = (
            saved_model(version),
            sum(part.stat().st_size for part in graph),
        )
    from_views = {"Keras `predict_on_batch`": (embedder.predict_on_batch, None)}
    for precision in ("float32", "float16", "dynamic_range", "int8"):
        path = version / "litert" / f"{precision}.tflite"
        if path.is_file():
            from_views[f"LiteRT {precision.replace('_', ' ')}"] = (
                interpreter(path),
                path.stat().st_size,
            )
    path = version / "onnx" / "model.onnx"
    if path.is_file():
        from_views["ONNX (onnxruntime)"] = (onnx_session(path), path.stat().st_size)
    return {"encoded images": from_bytes, "views": from_views}


def seconds(function, images, batch_size, calls):
    """Seconds of a call with a batch, the mean of some."""
    started = time.perf_counter()
    for call in range(calls):
        first = call * batch_size % (len(images) - batch_size + 1)
        function(images[first : first + batch_size])
    return (time.perf_counter() - started) / calls


def main():
    """Parse the command line, measure, print."""
    parser = command_line(__doc__)
    parser.add_argument("--run_dir", required=True, help="the run that was exported")
    parser.add_argument(
        "--model", required=True, type=pathlib.Path, help="the version, e.g. models/cars/1"
    )
    parser.add_argument(
        "--data_dir", default="", help="where the run's data set lies, if it has moved"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--calls", type=int, default=40, help="calls a round and contender with one image"
    )
    args = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import numpy as np

    from tfdml import data
    from tfdml.data.transforms import EvaluationTransform
    from tfdml.embeddings.backends import encoded_image
    from tfdml.export.exporter import load_run

    embedder, experiment = load_run(args.run_dir, data_dir=args.data_dir)
    test = data.load(
        experiment.dataset, experiment.data_dir or None, "test", **experiment.dataset_options
    )
    test = test.take(np.linspace(0, len(test) - 1, 100).astype(int))
    batches = data.evaluation_batches(test, EvaluationTransform.of(embedder), BATCH)
    inputs = {
        "encoded images": [encoded_image(test.images, row) for row in range(len(test))],
        "views": np.concatenate([images.numpy() for images, _ in batches]),
    }
    results = Results(args.json)
    for table, models in contenders(embedder, args.model).items():
        runners = {}
        for name, (function, _) in models.items():
            for batch, calls in ((1, args.calls), (BATCH, max(1, args.calls // 5))):
                runners[name, batch] = functools.partial(
                    seconds, function, inputs[table], batch, calls
                )
        # The first round compiles and warms up.
        in_turns(runners, 1)
        times = {
            key: statistics.median(values) for key, values in in_turns(runners, args.rounds).items()
        }
        reference = next(iter(models))
        row = results.table(
            table, f"from {table}", "batch 1, ms", "", f"batch {BATCH}, images/s", "", "MB"
        )
        for name, (_, size) in models.items():
            ratios = [
                times[name, 1] / times[reference, 1],
                times[reference, BATCH] / times[name, BATCH],
            ]
            cells = [f"{1e3 * times[name, 1]:.2f}", f"{ratios[0]:.2f}x"]
            row(
                name,
                *cells,
                f"{BATCH / times[name, BATCH]:,.0f}",
                f"{ratios[1]:.2f}x",
                f"{size / 1e6:.2f}" if size else "",
            )


if __name__ == "__main__":
    main()
