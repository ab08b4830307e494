"""A small network of random weights of each family of KerasHub, and presets of them as folders."""

import keras

# KerasHub takes seconds to import: what needs it imports it.
SIZE, PATCH = 32, 8
WIDTH = 32
TRANSFORMERS = ("dinov2", "dinov3", "vit", "deit", "clip", "siglip", "swin")
FAMILIES = (*TRANSFORMERS, "resnet")
# The scaling of the presets' image converters: that of CLIP.
SCALE = [1 / 68.5, 1 / 66.6, 1 / 70.3]
OFFSET = [-1.79, -1.75, -1.48]


def network(family, size=SIZE, layers=2, seed=0):
    """A backbone of KerasHub; of CLIP and SigLIP the one of images and text."""
    from keras_hub import models

    keras.utils.set_random_seed(seed)
    shape = (size, size, 3)
    small = {
        "patch_size": PATCH,
        "num_layers": layers,
        "num_heads": 2,
        "hidden_dim": WIDTH,
        "image_shape": shape,
    }
    if family == "dinov2":
        positions = {"position_embedding_shape": shape, "num_register_tokens": 3}
        return models.DINOV2Backbone(intermediate_dim=64, **small, **positions)
    if family == "dinov3":
        return models.DINOV3Backbone(intermediate_dim=64, **small)
    if family == "vit":
        return models.ViTBackbone(mlp_dim=64, **small)
    if family == "deit":
        return models.DeiTBackbone(intermediate_dim=64, **small)
    if family == "swin":
        return models.SwinTransformerBackbone(
            shape, 16, (1, 1), (2, 2), window_size=4, drop_path=0.0
        )
    if family == "resnet":
        return models.ResNetBackbone(
            [64], [3], [64, 64], [1, 1], [1, 2], "basic_block", image_shape=(None, None, 3)
        )
    name = {"clip": "CLIP", "siglip": "SigLIP"}[family]
    vision = getattr(models, f"{name}VisionEncoder")(intermediate_dim=64, **small)
    text = {"vocabulary_size": 10, "max_sequence_length": 4, "embedding_dim": 8, "hidden_dim": 8}
    text |= {"num_layers": 1, "num_heads": 2, "intermediate_dim": 8}
    if family == "clip":
        return models.CLIPBackbone(vision, models.CLIPTextEncoder(**text), projection_dim=8)
    return models.SigLIPBackbone(vision, models.SigLIPTextEncoder(projection_dim=WIDTH, **text))


def preset(folder, family, **options):
    """A preset as a folder: the backbone's name, and the network."""
    from keras_hub import layers

    made = network(family, **options)
    made.save_to_preset(str(folder))
    converter = next(
        cls
        for cls in (
            getattr(layers, name) for name in dir(layers) if name.endswith("ImageConverter")
        )
        if cls.backbone_cls is type(made)
    )
    converter(image_size=(SIZE, SIZE), scale=SCALE, offset=OFFSET).save_to_preset(str(folder))
    return f"hub:{folder}", made
