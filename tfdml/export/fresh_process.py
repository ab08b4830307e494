"""Embeds images with one exported file, in a process that knows neither Keras nor tfdml.

    python -P fresh_process.py saved_model MODEL_FOLDER IN.npz OUT.npy
    python -P fresh_process.py litert FILE.tflite IN.npz OUT.npy
    python -P fresh_process.py onnx FILE.onnx IN.npz OUT.npy

`tfdml.export.exporter` runs this file by its path; it must import nothing of tfdml. IN.npz holds `views`
(N, S, S, 3) uint8 or (N, D) vectors, or the bytes of encoded images one after another in `encoded`, which end at
`ends`. Standard input is a pipe from the process that waits for the embeddings. The process ends when it is closed.
"""

import itertools
import os
import sys
import threading

import numpy as np

BATCH = 32


def saved_model(path):
    """Return the function of a SavedModel from encoded images, or vectors, to embeddings; TensorFlow alone is there."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # Importing a module that is None fails.
    sys.modules.update(dict.fromkeys(("keras", "tf_keras", "tfdml"), None))  # type: ignore[arg-type]
    import tensorflow as tf

    loaded = tf.saved_model.load(path)
    serve = loaded.signatures["serving_default"]

    def embed(images, loaded=loaded):
        (name,) = serve.structured_input_signature[1]
        return serve(**{name: tf.constant(images)})["embedding"].numpy()

    return embed


def litert(path):
    """Return the function of a .tflite file from views to embeddings; TensorFlow is used where LiteRT is missing."""
    try:
        from ai_edge_litert.interpreter import Interpreter
    except ImportError:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        import tensorflow as tf

        Interpreter = tf.lite.Interpreter
    interpreter = Interpreter(model_path=path, num_threads=os.cpu_count())
    run = interpreter.get_signature_runner()
    (name,) = run.get_input_details()
    return lambda views: run(**{name: views})["embedding"]


def onnx(path):
    """Return the function of an ONNX file from views to embeddings."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda views: session.run(["embedding"], {name: views})[0]


def end_with_parent():
    """End this process when standard input is closed at its other end."""
    os.read(0, 1)
    os._exit(1)


def main(kind, path, source, target):
    """Embed and write."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    embed = {"saved_model": saved_model, "litert": litert, "onnx": onnx}[kind](path)
    with np.load(source) as stored:
        if "ends" in stored:
            ends = [0, *stored["ends"].tolist()]
            data = stored["encoded"].tobytes()
            images = [data[first:last] for first, last in itertools.pairwise(ends)]
        else:
            images = stored["views"]
    parts = [embed(images[first : first + BATCH]) for first in range(0, len(images), BATCH)]
    np.save(target, np.concatenate(parts))


if __name__ == "__main__":
    main(*sys.argv[1:])
