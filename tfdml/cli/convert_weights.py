"""bin/convert_weights: from published checkpoints to weights files for --weights."""

from __future__ import annotations

from pathlib import Path

from absl import flags

from tfdml.backbones.conversion import ARCHITECTURES, convert
from tfdml.cli import main as command_line
from tfdml.effects import Effect, both, needs
from tfdml.errors import UserError

USAGE = """
Convert a PyTorch or Caffe checkpoint into a weights file of the Keras backbone of the same architecture.

  bin/convert_weights --from=bn_inception-52deb4733.pth --architecture=bn_inception --out=bn_inception.weights.h5
  bin/convert_weights --from=bvlc_googlenet.caffemodel --architecture=googlenet --out=googlenet.weights.h5
  bin/convert_weights --from=googlenet-1378be20.pth --architecture=googlenet_bn --out=googlenet_bn.weights.h5
  bin/convert_weights --from=resnet50-0676ba61.pth --architecture=resnet50_v1_5 --out=resnet50.weights.h5
  bin/convert_weights --from=ResNet-50-model.caffemodel --architecture=resnet50 --out=resnet50.weights.h5
  bin/train --backbone=bn_inception --weights=bn_inception.weights.h5 ...

Read are PyTorch files of a state dict, .safetensors, .caffemodel, .h5 and .npz; neither PyTorch nor Caffe is needed,
and nothing in a file is executed. The classifier is left out. Every array must fit, or nothing is written.
"""

flags.DEFINE_string("from", "", "The checkpoint.", module_name=__name__)
flags.DEFINE_enum("architecture", None, list(ARCHITECTURES), "What it is a checkpoint of.", module_name=__name__)
flags.DEFINE_string("out", "", "The file to write, NAME.weights.h5; must not exist yet.", module_name=__name__)
flags.DEFINE_bool(
    "stride_in_1x1",
    False,
    "resnet50 from a PyTorch checkpoint: it is a port of Caffe's, with the stride in the 1x1 convolution of a block.",
    module_name=__name__,
)
flags.DEFINE_bool(
    "allow_extra", False, "Leave out arrays that the backbone has no place for, such as a head.", module_name=__name__
)
flags.DEFINE_bool("dry_run", False, "Read and check the checkpoint, write nothing.", module_name=__name__)

EFFECTS = command_line.Effects(
    {
        "stride_in_1x1": both(
            needs("architecture", "resnet50"),
            Effect(lambda given: not given["from"].endswith(".caffemodel"), "a checkpoint that is not Caffe's"),
        )
    },
    frozenset({"from", "architecture", "out", "allow_extra", "dry_run"}),
)

# The flags whose names are not those of the arguments that they set.
FLAG_OF = {"path": "from"}


def convert_weights() -> None:
    """Convert as the flags say."""
    values = flags.FLAGS
    for name in ("from", "architecture", "out"):
        if not values[name].value:
            raise UserError(f"--{name} is missing")
    out = Path(values.out)
    if not out.name.endswith(".weights.h5") or out.name == ".weights.h5":
        raise UserError(f"--out={out}: the name must end in .weights.h5")
    if out.exists():
        raise UserError(f"--out={out} exists already: name another file, or remove it")
    if not out.resolve().parent.is_dir():
        raise UserError(f"--out={out}: its folder does not exist")

    from tfdml import backbones
    from tfdml.storage import atomic_write, sweep

    source = str(values["from"].value)
    converted = convert(source, values.architecture, values.stride_in_1x1, values.allow_extra)
    model = converted.model
    print(f"{values.architecture}: {len(model.weights)} arrays, {model.count_params():,} numbers")
    if converted.left_out:
        shown = ", ".join(converted.left_out[:4]) + (" ..." if len(converted.left_out) > 4 else "")
        print(f"left out, {len(converted.left_out)}: {shown}")
    if values.dry_run:
        print(f"would write {out}")
        return
    sweep(out.parent)
    try:
        with atomic_write(out) as temporary:
            model.save_weights(temporary)
            backbones.load_weights(model, str(temporary))
    except OSError as error:
        raise UserError(f"--out={out} cannot be written: {error.strerror or error}") from error
    print(f"written: {out}   (--backbone={values.architecture} --weights={out})")


def main() -> None:
    """Entry point."""
    command_line.run(convert_weights, "convert_weights", USAGE, flag_of=FLAG_OF, effects=EFFECTS)


if __name__ == "__main__":
    main()
