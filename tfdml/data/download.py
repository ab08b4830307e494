"""Downloads published data sets: transfers that resume, checksums, archives unpacked atomically."""

import dataclasses
import functools
import os
import posixpath
import shutil
import tarfile
import time
import urllib.parse
import zipfile
import zlib
from collections.abc import Callable

from tfdml.errors import UserError, short_message
from tfdml.io import files
from tfdml.io.files import is_disk_full, unwritable
from tfdml.version import __version__

Progress = Callable[[str, int, int], None]  # what is being done, bytes done, of how many (0: unknown)

_BLOCK = 2**16  # a dropped connection loses at most so much
_MEGABYTE = 2**20
_ATTEMPTS = 10
_PAUSE = 1.0  # seconds after the first attempt; longer after each further one
_TIMEOUT = 60.0  # seconds without a byte
# Responses after which another attempt can help.
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)


@dataclasses.dataclass(frozen=True)
class Download:
    """A file that a publisher offers, and what it unpacks to.

    Args:
        url: Where it is; http or https.
        size: Its length in bytes.
        sha256: Its checksum, in hexadecimal.
        folder: The folder that unpacking it makes; None for an archive that is read as it is.
    """

    url: str
    size: int
    sha256: str
    folder: str | None = None

    @property
    def name(self) -> str:
        """The name of the file."""
        return posixpath.basename(urllib.parse.urlsplit(self.url).path)


# Sizes and checksums as TensorFlow Datasets and other projects independently record them.
DOWNLOADS: dict[str, tuple[Download, ...]] = {
    "cub200": (
        Download(
            "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz?download=1",
            1_150_585_339,
            "0c685df5597a8b24909f6a7c9db6d11e008733779a671760afef78feb49bf081",
            "CUB_200_2011",
        ),
    ),
    "omniglot": (
        Download(
            "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/images_background.zip",
            9_464_212,
            "ad41ab679c8b5d90b271ef46be6987cc81211774a695c29dcc5367b2b26ee640",
        ),
        Download(
            "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/images_evaluation.zip",
            6_462_886,
            "1f61a8f3366785b057fc117d9228e78a16e3d976c8953b2a10fcc74cf0609cee",
        ),
    ),
    "sop": (
        Download(
            "http://ftp.cs.stanford.edu/cs/cvgl/Stanford_Online_Products.zip",
            3_083_860_082,
            "b04fa78210e69fab050ce73939550e1cd0f96890bdd98ec9fee732c3b756ef48",
            "Stanford_Online_Products",
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
}


def download(name: str, data_dir: str | os.PathLike, progress: Progress = lambda *_: None) -> list[str]:
    """Download and unpacks the files of a data set that are not there yet.

    Args:
        name: The catalog's name of the data set.
        data_dir: The folder to put it in, on a local disk.
        progress: Called now and then.

    Returns:
        The paths of the new files and folders; empty if all were there.

    Raises:
        UserError: The publisher offers no file (the message says where to get it), or the download failed.

    Example:
        >>> download("cub200", "data")  # data/CUB_200_2011 is there
        []
    """
    folder = os.path.expanduser(os.fspath(data_dir))
    if name in BY_HAND:
        raise UserError(f"{name} cannot be downloaded: {BY_HAND[name]}")
    if name not in DOWNLOADS:
        raise UserError(f"{name} cannot be downloaded, only {', '.join(sorted(DOWNLOADS))}")
    if "://" in folder or not folder:
        raise UserError(f"`data_dir` must be a folder on a local disk to download to, not {folder!r}")
    new = []
    # The readers take the unpacked folder itself as data_dir as well.
    if os.path.basename(os.path.abspath(folder)) in [file.folder for file in DOWNLOADS[name]]:
        folder = os.path.dirname(os.path.abspath(folder))
    for file in DOWNLOADS[name]:
        path = os.path.join(folder, file.name)
        target = os.path.join(folder, file.folder) if file.folder else path
        if file.folder and os.path.exists(target):
            continue
        fetched = fetch(file, path, functools.partial(progress, f"fetching {file.name}"))
        if file.folder:
            progress(f"unpacking {file.name}", 0, 0)
            unpack(path, folder, file.folder)
        if fetched or file.folder:
            new.append(target)
    return new


def fetch(file: Download, path: str | os.PathLike, progress: Callable[[int, int], None] = lambda *_: None) -> bool:
    """Download a file, unless it is there already.

    The bytes that have arrived are in `path` + `.part` until the file is complete and its checksum right. Called again
    after an interruption, it asks only for the rest.

    Args:
        file: The file.
        path: Where to put it, on a local disk.
        progress: Called with the bytes that have arrived, and all of them.

    Returns:
        Whether anything had to be fetched.

    Raises:
        UserError: The server refuses, cannot be reached or sends another file; the disk is too small; another process
            is fetching the same file; or another file is at `path`.

    Example:
        >>> file = Download("https://example.org/car.jpg", os.path.getsize("car.jpg"), files.sha256_of("car.jpg"))
        >>> fetch(file, "car.jpg")  # it is there
        False
    """
    import requests

    path = os.fspath(path)
    folder, name = os.path.split(os.path.abspath(path))
    part = f"{path}.part"
    try:
        os.makedirs(folder, exist_ok=True)
        with files.locked(folder, "data_dir", f".{name}.lock"):
            if os.path.exists(path):
                if files.sha256_of(path) != file.sha256:
                    raise UserError(f"{path} is another file (its SHA-256 differs): move it away")
                return False
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    is_from_start = _receive(file, part, progress)
                except requests.RequestException:
                    if attempt == _ATTEMPTS:
                        raise
                    time.sleep(_PAUSE * attempt)
                    continue
                if files.sha256_of(part) == file.sha256:
                    break
                os.unlink(part)
                if is_from_start:
                    raise _refusal(file, part, "sent another file than the published one (its SHA-256 differs)")
            os.replace(part, path)
    except OSError as error:  # also those of requests
        if error.errno is not None:
            raise unwritable(path, error) from error
        arrived = f"{_size_of(part) / _MEGABYTE:,.1f} MB"
        kept = f"what has arrived ({arrived}) is kept: run the same command again to resume"
        why = f"{short_message(error, 'last')}, {_ATTEMPTS} attempts"
        raise UserError(f"{file.url} cannot be fetched ({why}); {kept}") from error
    return True


def _size_of(path: str) -> int:
    return os.path.getsize(path) if os.path.exists(path) else 0


def _receive(file: Download, part: str, progress: Callable[[int, int], None]) -> bool:
    """Fetch what a part lacks of a file; returns whether the server sent the file from its beginning."""
    import requests

    have = _size_of(part)
    if have >= file.size:
        return False
    headers = {"User-Agent": f"tfdml/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with requests.get(file.url, headers=headers, stream=True, timeout=_TIMEOUT) as answer:
        if answer.status_code in _TRANSIENT:
            answer.raise_for_status()
        if answer.status_code not in (200, 206):
            raise _refusal(file, part, f"cannot be fetched (HTTP {answer.status_code} {answer.reason})", answer.url)
        if answer.status_code == 200:
            have, length = 0, int(answer.headers.get("Content-Length") or file.size)
            if length != file.size:
                raise _refusal(file, part, f"is a file of {length:,} bytes instead of {file.size:,}", answer.url)
        with open(part, "ab" if have else "wb") as target:
            for block in answer.iter_content(_BLOCK):
                have += len(block)
                if have > file.size:  # a server that states no length may send without end
                    break
                target.write(block)
                progress(have, file.size)
    if have > file.size:
        os.unlink(part)
        raise _refusal(file, part, f"sends more than its {file.size:,} bytes", answer.url)
    if have < file.size:
        raise requests.ConnectionError("the connection was closed before the end")
    return answer.status_code == 200


def _refusal(file: Download, part: str, what: str, url: str = "") -> UserError:
    """Return the error after which another attempt cannot help."""
    return UserError(f"{url or file.url} {what}; fetch it by hand and put it at {part.removesuffix('.part')}")


def unpack(archive: str | os.PathLike, folder: str | os.PathLike, last: str | None = None) -> list[str]:
    """Unpacks a zip or tar archive into a folder, never outside it, and atomically.

    Args:
        archive: The archive.
        folder: Where its content goes. Files that are there already stay.
        last: The top-level entry to move into place after all others, so that its presence shows that all is there.

    Returns:
        The new top-level entries.

    Raises:
        UserError: The archive is damaged, or holds links or names that lead outside the folder; an entry is there
            already; or the disk is too small. Nothing is left behind.

    Example:
        >>> unpack("CUB_200_2011.tgz", "unpacked", last="CUB_200_2011")
        ['attributes.txt', 'CUB_200_2011']
    """
    archive, folder = os.fspath(archive), os.fspath(folder)
    os.makedirs(folder, exist_ok=True)
    place = os.path.join(folder, f".unpacking-{os.path.basename(archive)}")
    shutil.rmtree(place, ignore_errors=True)  # of an attempt that was cut short
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as file:
                file.extractall(place)  # leaves out what leads outside
        else:
            with tarfile.open(archive) as file:
                file.extractall(place, filter="data")
        names = sorted(os.listdir(place), key=lambda name: (name == last, name))
        for name in names:
            if os.path.lexists(os.path.join(folder, name)):
                raise UserError(f"{os.path.join(folder, name)} is there already; move it away to unpack {archive}")
        for name in names:
            os.rename(os.path.join(place, name), os.path.join(folder, name))
        return names
    except tarfile.FilterError as error:
        raise UserError(f"{archive} is not unpacked for safety: {error}") from error
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise UserError(f"{archive} is not a whole archive ({error}); delete it and download it again") from error
    except OSError as error:
        if is_disk_full(error):
            raise unwritable(folder, error) from error
        # gzip reports damage by an OSError without a number.
        reason = error.strerror or f"{error}; if it is damaged, delete it and download it again"
        raise UserError(f"{archive} cannot be unpacked into {folder} ({reason})") from error
    finally:
        shutil.rmtree(place, ignore_errors=True)
