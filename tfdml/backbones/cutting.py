"""Cutting a network in two at a layer."""

import difflib

import keras

from tfdml.workarounds import producer_of


def cut(model: keras.Model, at: str) -> tuple[keras.Model, keras.Model]:
    """Return the part of a network up to a layer, that layer included, and the rest.

    Both parts share their layers, and so their weights, with `model`: rest(trunk(x)) is model(x).

    Args:
        model: A functional model with one input and one output.
        at: The name of a layer that everything passes through, such as `inception_4a` or `conv4_block1_out`.

    Returns:
        The trunk and the rest.

    Raises:
        ValueError: There is no such layer, something goes past it, or the model is not a functional one.

    Example:
        >>> model = tfdml.backbones.resolve("googlenet", image_size=224).model
        >>> trunk, rest = cut(model, at="pool3_3x3_s2")
        >>> trunk.output_shape, rest.output_shape
        ((None, 14, 14, 480), (None, 7, 7, 1024))
    """
    if not getattr(model, "inputs", None) or len(model.inputs) != 1 or len(model.outputs) != 1:
        raise ValueError(f"{model.name} cannot be cut: it is no functional model with one input and one output")
    names = [layer.name for layer in model.layers]
    if at not in names:
        alike = difflib.get_close_matches(at, names, n=4, cutoff=0.5)
        hint = f"; near: {', '.join(alike)}" if alike else ""
        raise ValueError(f"{model.name} has no layer {at!r} to cut at{hint}")
    made = [tensor for tensor in _walk(model).values() if producer_of(tensor)[0].name == at]
    if len(made) != 1 or at in [producer_of(end)[0].name for end in (model.inputs[0], model.outputs[0])]:
        raise ValueError(f"{model.name} cannot be cut at {at!r}: nothing would be left on one side")
    if model.inputs[0] is _walk(model, without=at).get(id(model.inputs[0])):
        raise ValueError(f"{model.name} cannot be cut at {at!r}: other layers go past it")
    trunk = keras.Model(model.inputs[0], made[0], name=f"{model.name}_to_{at}")
    rest = keras.Model(made[0], model.outputs[0], name=f"{model.name}_from_{at}")
    return trunk, rest


def _walk(model: keras.Model, without: str | None = None) -> dict[int, keras.KerasTensor]:
    """Return the tensors from which the output is made, by id, not going through the layer `without`."""
    found: dict[int, keras.KerasTensor] = {}
    waiting = list(model.outputs)
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in found:
            continue
        found[id(tensor)] = tensor
        # A layer may have been called in other models too: only the call that made this tensor counts.
        operation, inputs = producer_of(tensor)
        if operation.name != without:
            waiting.extend(inputs)
    return found
