"""Where the data sets of the catalogue come from, and how to get those whose publisher still offers them."""

from __future__ import annotations

import dataclasses
import functools
import os
import posixpath
import urllib.parse
from collections.abc import Callable

from tfdml.data.download.archives import unpack
from tfdml.data.download.http import RemoteFile, fetch
from tfdml.errors import UserError

Progress = Callable[[str, int, int], None]  # what is being done, bytes done, of how many (0: unknown)


@dataclasses.dataclass(frozen=True)
class Offer:
    """A file of a data set, and what becomes of it.

    Args:
        file: The file.
        makes: The folder that unpacking it makes; None for an archive that is read as it is.
    """

    file: RemoteFile
    makes: str | None = None

    @property
    def name(self) -> str:
        """What the file is called."""
        return posixpath.basename(urllib.parse.urlsplit(self.file.url).path)


# Sizes and checksums as TensorFlow Datasets and other projects independently record them.
OFFERS: dict[str, tuple[Offer, ...]] = {
    "cub200": (
        Offer(
            RemoteFile(
                "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz?download=1",
                1_150_585_339,
                "0c685df5597a8b24909f6a7c9db6d11e008733779a671760afef78feb49bf081",
            ),
            makes="CUB_200_2011",
        ),
    ),
    "omniglot": (
        Offer(
            RemoteFile(
                "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/images_background.zip",
                9_464_212,
                "ad41ab679c8b5d90b271ef46be6987cc81211774a695c29dcc5367b2b26ee640",
            )
        ),
        Offer(
            RemoteFile(
                "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/images_evaluation.zip",
                6_462_886,
                "1f61a8f3366785b057fc117d9228e78a16e3d976c8953b2a10fcc74cf0609cee",
            )
        ),
    ),
    "sop": (
        Offer(
            RemoteFile(
                "http://ftp.cs.stanford.edu/cs/cvgl/Stanford_Online_Products.zip",
                3_083_860_082,
                "b04fa78210e69fab050ce73939550e1cd0f96890bdd98ec9fee732c3b756ef48",
            ),
            makes="Stanford_Online_Products",
        ),
    ),
}
# What to do where a publisher offers nothing that could be fetched.
BY_HAND = {
    "cars196": (
        "its publisher has taken the files down (they were at ai.stanford.edu/~jkrause/cars); copies of the images are "
        "on Kaggle (jessicali9530/stanford-cars-dataset), and https://github.com/pytorch/vision/issues/7545 says "
        "where to find the devkit with the labels of the test images; data_dir must hold cars_train/, cars_test/, "
        "devkit/cars_train_annos.mat and devkit/cars_test_annos_withlabels.mat, or car_ims/ and cars_annos.mat"
    ),
    "inshop": (
        "its publisher asks for an agreement: follow "
        "https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html, then put Eval/list_eval_partition.txt "
        "and the unpacked img/ into data_dir"
    ),
    "tfds": "TFDS fetches its data sets itself: pass its `options` name=... and download=true",
}


def obtain(name: str, data_dir: str | os.PathLike, progress: Progress = lambda *_: None) -> list[str]:
    """Downloads and unpacks what is not there yet of a data set.

    Args:
        name: The catalogue's name of the data set.
        data_dir: The folder to put it in, on a local disk.
        progress: Called now and then.

    Returns:
        What was made, as paths; empty if all was there.

    Raises:
        UserError: The publisher offers nothing that could be fetched (the message says where to get it), or the
            download failed.

    Example:
        >>> obtain("cub200", "data")  # data/CUB_200_2011 is there
        []
    """
    folder = os.path.expanduser(os.fspath(data_dir))
    name = {"cub": "cub200"}.get(name, name)
    if name in BY_HAND:
        raise UserError(f"{name} cannot be downloaded: {BY_HAND[name]}")
    if name not in OFFERS:
        raise UserError(f"{name} cannot be downloaded, only {', '.join(sorted(OFFERS))}")
    if "://" in folder or not folder:
        raise UserError(f"`data_dir` must be a folder on a local disk to download to, not {folder!r}")
    made = []
    # The readers take the unpacked folder itself as data_dir as well.
    if os.path.basename(os.path.abspath(folder)) in [offer.makes for offer in OFFERS[name]]:
        folder = os.path.dirname(os.path.abspath(folder))
    for offer in OFFERS[name]:
        path = os.path.join(folder, offer.name)
        target = os.path.join(folder, offer.makes) if offer.makes else path
        if offer.makes and os.path.exists(target):
            continue
        fetched = fetch(offer.file, path, progress=functools.partial(progress, f"fetching {offer.name}"))
        if offer.makes:
            unpack(path, folder, offer.makes, functools.partial(progress, f"unpacking {offer.name}"))
        if fetched or offer.makes:
            made.append(target)
    return made
