r"""Convert published ImageNet checkpoints into weights files of the Keras backbones.

  python -m tools.convert_weights --from=bn_inception-52deb4733.pth --architecture=bn_inception \
      --out=bn.weights.h5
  python -m tools.convert_weights --from=googlenet-1378be20.pth --architecture=googlenet_bn \
      --out=gn.weights.h5
  python -m tools.convert_weights --from=resnet50-0676ba61.pth --architecture=resnet50_v1_5 \
      --out=resnet50.weights.h5
  python -m tools.convert_weights --from=bvlc_googlenet.npz --architecture=googlenet \
      --out=googlenet.weights.h5
  tfdml train --backbone=bn_inception --weights=bn.weights.h5 ...

Reads state dicts (.pth, .safetensors; both need `pip install torch safetensors`) and .npz files of
arrays, whose names are those of PyTorch (conv1.weight). Never runs code from a file. Leaves out the
classifier. Every other array must fit, or nothing is written.
"""

from __future__ import annotations

import argparse
import pickle
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfdml import backbones
from tfdml.backbones.networks import bn_inception, googlenet, resnet50_v1_5
from tfdml.errors import UserError, short_message
from tfdml.io.files import atomic_write, sha256_of, sweep, write_whole

# The classifier, auxiliary classifiers and counters of a checkpoint: left out without complaint.
_TOP = re.compile(
    r"(last_linear|fc|fc1000|classifier|aux\d?|loss\d)\b.*|loss\d_.*|.*\.num_batches_tracked"
)
# The keys under which training scripts store the state dict.
_NESTED = ("state_dict", "model_state_dict", "model", "net", "network", "ema")
_TORCH = ("weight", "bias", "running_mean", "running_var")
_RESNET = re.compile(r"conv(\d)_block(\d)_(\d)_(conv|bn)")
_GOOGLENET_STEM = {"conv1_7x7_s2": "conv1", "conv2_3x3_reduce": "conv2", "conv2_3x3": "conv3"}
_GOOGLENET_BRANCHES = {
    "1x1": "branch1",
    "3x3_reduce": "branch2.0",
    "3x3": "branch2.1",
    "5x5_reduce": "branch3.0",
    "5x5": "branch3.1",
    "pool_proj": "branch4.1",
}


def same_name(layer: str) -> str:
    """Return the layer's name: the Inception networks of Caffe and their ports keep the names."""
    return layer


def torchvision_googlenet(layer: str) -> str:
    """Return torchvision's name of a layer: `inception_3a_3x3_reduce_bn` ->
    `inception3a.branch2.0.bn`."""
    kind = "bn" if layer.endswith("_bn") else "conv"
    layer = layer.removesuffix("_bn")
    if layer in _GOOGLENET_STEM:
        return f"{_GOOGLENET_STEM[layer]}.{kind}"
    _, module, branch = layer.split("_", 2)
    return f"inception{module}.{_GOOGLENET_BRANCHES[branch]}.{kind}"


def torchvision_resnet(layer: str) -> str:
    """Return torchvision's name of a layer: `conv2_block1_0_conv` -> `layer1.0.downsample.0`."""
    if layer in ("conv1_conv", "conv1_bn"):
        return {"conv1_conv": "conv1", "conv1_bn": "bn1"}[layer]
    stage, block, place, kind = _RESNET.fullmatch(layer).groups()  # type: ignore[union-attr]
    inner = f"downsample.{int(kind == 'bn')}" if place == "0" else f"{kind}{place}"
    return f"layer{int(stage) - 1}.{int(block) - 1}.{inner}"


# What builds a backbone, and what its layers are called in checkpoints. BatchNorm's epsilons are
# the checkpoints'.
ARCHITECTURES: dict[str, tuple[Callable[[], keras.Model], Callable[[str], str]]] = {
    "bn_inception": (bn_inception, same_name),
    "googlenet": (googlenet, same_name),
    "googlenet_bn": (lambda: googlenet(variant="batch_norm"), torchvision_googlenet),
    "resnet50_v1_5": (resnet50_v1_5, torchvision_resnet),
}


def read_checkpoint(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of a .npz, .safetensors or PyTorch file, by name, as float32.

    Raises:
        UserError: The file is missing, damaged, holds more than tensors, or needs a library that is
            not installed.
    """
    if not path.is_file():
        raise UserError(f"--from={path}: there is no such file")
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return {name: array.astype(np.float32) for name, array in file.items()}
        import torch  # for .safetensors as well: NumPy has no bfloat16

        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
            if isinstance(state, dict) and not any(
                isinstance(item, torch.Tensor) for item in state.values()
            ):
                state = next(
                    (state[key] for key in _NESTED if isinstance(state.get(key), dict)), {}
                )
        tensors = state.items() if isinstance(state, dict) else ()
        arrays = {
            str(name): item.detach() for name, item in tensors if isinstance(item, torch.Tensor)
        }
        if not arrays:
            raise UserError(
                f"--from={path} holds no state dict (a dictionary from names to tensors)"
            )
        return {name: tensor.float().numpy() for name, tensor in arrays.items()}
    except UserError:
        raise
    except ImportError as error:
        raise UserError(
            f"--from={path} needs {error.name}: pip install torch safetensors"
        ) from error
    except pickle.UnpicklingError as error:
        # PyTorch's own message suggests to run the file.
        match = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise UserError(
            f"--from={path} is damaged or holds more than "
            f"tensors{f' ({match[1]})' if match else ''}, and no code of a "
            "file is run. Where the model's code is at hand, write torch.save(model.state_dict(), "
            "'file.pth')"
        ) from error
    except Exception as error:
        # Whatever a damaged file makes the readers raise.
        raise UserError(
            f"--from={path} is damaged or no checkpoint ({short_message(error, named=True)})"
        ) from error


def convert(
    path: Path, architecture: str, allow_extra: bool = False
) -> tuple[keras.Model, list[str]]:
    """Build a backbone with the weights of a checkpoint.

    Names may have a common prefix (`module.`, `backbone.`). Caffe's slashes are read as
    underscores.

    Args:
        path: A file that `read_checkpoint` reads.
        architecture: One of `ARCHITECTURES`.
        allow_extra: Leave out arrays that the backbone has no place for, instead of refusing them.

    Returns:
        The backbone, and the names of the arrays that are not in it.

    Raises:
        UserError: The file cannot be read, or its arrays do not fit the architecture.
    """
    build, rename = ARCHITECTURES[architecture]
    arrays = {name.replace("/", "_"): array for name, array in read_checkpoint(path).items()}
    model = build()
    layers = [layer for layer in model.layers if layer.weights]
    first = f"{rename(layers[0].name)}.{_TORCH[0]}"
    prefixes = [name.removesuffix(first) for name in arrays if name.endswith(f".{first}")]
    if first not in arrays and prefixes:
        arrays = {
            name.removeprefix(min(prefixes, key=len)): array for name, array in arrays.items()
        }
    used: set[str] = set()
    problems: list[str] = []

    def take(name: str, shape: tuple[int, ...]) -> np.ndarray:
        array = arrays.get(name)
        used.add(name)
        if array is None:
            problems.append(f"{name} {shape} is missing")
            return np.zeros(shape)
        if array.shape != shape:
            problems.append(f"{name} has shape {array.shape}, not {shape}")
            return np.zeros(shape)
        if not np.all(np.isfinite(array)):
            problems.append(f"{name} holds numbers that are not finite")
        return array

    def weights_of(layer: keras.layers.Layer) -> list[np.ndarray]:
        shapes = [tuple(weight.shape) for weight in layer.weights]
        names = [f"{rename(layer.name)}.{slot}" for slot in _TORCH[: len(shapes)]]
        if not isinstance(layer, keras.layers.Conv2D):
            return [take(name, shape) for name, shape in zip(names, shapes, strict=True)]
        height, width, channels, filters = shapes[0]
        kernel = take(names[0], (filters, channels, height, width)).transpose(2, 3, 1, 0)
        return [kernel, *map(take, names[1:], shapes[1:])]

    weights = [weights_of(layer) for layer in layers]
    extra = [name for name in arrays if name not in used and not _TOP.fullmatch(name)]
    hint = f"; it has {', '.join(extra[:3])} ..." if extra else ""
    if not allow_extra and not problems and extra:
        problems = [f"{name} is not part of it" for name in extra]
        hint = "; --allow_extra leaves such arrays out"
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UserError(
            f"--from={path} does not fit {architecture}: {'; '.join(problems[:5])}{more}{hint}"
        )
    for layer, values in zip(layers, weights, strict=True):
        layer.set_weights(values)
    return model, sorted(set(arrays) - used)


def convert_weights(
    path: Path, architecture: str, out: Path, allow_extra: bool, dry_run: bool
) -> None:
    """Convert a checkpoint and write the weights file.

    Raises:
        UserError: The checkpoint does not fit, or the file cannot be written.
    """
    if not out.name.endswith(".weights.h5") or out.name == ".weights.h5":
        raise UserError(f"--out={out}: the name must end in .weights.h5")
    if out.exists():
        raise UserError(f"--out={out} exists already: name another file, or remove it")
    if not out.resolve().parent.is_dir():
        raise UserError(f"--out={out}: its folder does not exist")
    model, left_out = convert(path, architecture, allow_extra)
    print(f"{architecture}: {len(model.weights)} arrays, {model.count_params():,} numbers")
    if left_out:
        print(
            f"left out, {len(left_out)}: "
            f"{', '.join(left_out[:4])}{' ...' if len(left_out) > 4 else ''}"
        )
    if dry_run:
        print(f"would write {out}")
        return
    sweep(out.parent)  # temporary files of processes that were killed
    checksum = out.with_name(f"{out.name}.sha256")
    checksum.unlink(missing_ok=True)
    with atomic_write(out) as temporary:
        model.save_weights(temporary)
        backbones.load_weights(model, str(temporary))
    write_whole(checksum, f"{sha256_of(out)}  {out.name}\n".encode())
    print(f"written: {out}   (--backbone={architecture} --weights={out})")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        "python -m tools.convert_weights",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--from", dest="path", type=Path, required=True, help="the checkpoint")
    parser.add_argument(
        "--architecture", choices=list(ARCHITECTURES), required=True, help="its network"
    )
    parser.add_argument("--out", type=Path, required=True, help="a new file, NAME.weights.h5")
    parser.add_argument(
        "--allow_extra",
        action="store_true",
        help="leave out arrays that the backbone has no place for",
    )
    parser.add_argument(
        "--dry_run", action="store_true", help="read and check the checkpoint, write nothing"
    )
    try:
        convert_weights(**vars(parser.parse_args(arguments)))
    except OSError as error:
        parser.exit(2, f"convert_weights: error: {error.filename}: {error.strerror}\n")
    except UserError as error:
        parser.exit(2, f"convert_weights: error: {error}\n")


if __name__ == "__main__":
    main()
