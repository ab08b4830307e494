"""Every entrance by which a name comes from outside, other than a table file, reads it alike."""

import ast
import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from starlette.testclient import TestClient

import tfdml
from tests.cli import commands
from tfdml import names
from tfdml.cli import embed as embed_command
from tfdml.cli import search as search_command
from tfdml.data import ArrayImages, EncodedImages, FileImages, ImageDataset
from tfdml.data.images import OptionalImages
from tfdml.embeddings import ImageTable
from tfdml.embeddings.backends import EmbeddingBackend
from tfdml.errors import UserError
from tfdml.evaluation import (
    KNNClassifier,
    calibrate,
    class_embeddings,
    evaluate_classification,
    evaluate_zero_shot,
    identification_rates,
    paired_differences,
    views,
)
from tfdml.export.retriever import RetrieverItems
from tfdml.models import ByteTokenizer, TextEmbedder, byte_encoder
from tfdml.results import RetrievalResults
from tfdml.retrieval import Neighbors
from tfdml.web.application import application
from tfdml.web.lanes import Lanes
from tfdml.web.page import Demo, page_routes
from tfdml.web.pictures import Pictures
from tfdml.web.requests import parse_call
from tfdml.web.settings import WebSettings

COMPOSED, DECOMPOSED = "caf\u00e9", "cafe\u0301"
PIXELS = np.zeros((2, 8, 8, 3), np.uint8)
# Two classes far apart, of ten images each.
POINTS = np.repeat([0.0, 5.0], 10)[:, None] + np.arange(20)[:, None] / 100
QUERIES = POINTS + 0.003
NUMBERS = [0] * 10 + [1] * 10
TWO_NAMES = [COMPOSED] * 10 + ["bus"] * 10


def tens(value):
    """Ten of this class, and ten others."""
    return [value] * 10 + ["bus"] * 10


class Backend(EmbeddingBackend):
    """Embeds a text as its length and its first byte, and keeps what it was given."""

    kind, embeds_texts = "keras", True

    def __init__(self):
        self.address = "backend"

    def checksum(self):
        return "sha256:1"

    fingerprint = checksum
    _stream = _stream_readable = None

    def _embed_texts(self, texts):
        self.texts = list(texts)
        return np.array([[len(text), ord(text[0])] for text in texts], np.float32)


def of_index(labels, image_id="a", class_names=None):
    index = tfdml.Index(lambda images: images)
    index.add(POINTS, labels, [image_id, *range(19)], class_names=class_names)
    return index.labels.tolist(), index.ids


def of_a_calibrated_index(value):
    index = tfdml.Index(lambda images: images)
    index.add(POINTS, TWO_NAMES)
    return index.calibrate(QUERIES, tens(value), fpir=0.1).threshold


def of_results(labels=(0, 1), gallery_labels=(0, 1), **options):
    results = RetrievalResults.search(
        POINTS[::10], list(labels), POINTS[::10], list(gallery_labels), k=2, **options
    )
    return {name: column.tolist() for name, column in results.columns.items()}


def of_neighbors(query="a", neighbor="b"):
    neighbors = Neighbors(np.array([[neighbor], [None]], object), np.ones((2, 1)), {})
    results = RetrievalResults.of_neighbors([query, "c"], neighbors)
    return results.column("query").tolist(), results.column("id").tolist()


def of_classifier(kind, value):
    return kind(POINTS, tens(value)).classify(POINTS).labels.tolist()


def added(value):
    classifier = KNNClassifier(POINTS, TWO_NAMES)
    classifier.add([[9.0]], [value])
    return classifier.classes.tolist()


def of_dataset(**columns):
    dataset = ImageDataset(images=PIXELS, labels=[0, 1], **columns)
    return dataset.class_names, None if dataset.texts is None else dataset.texts.tolist()


def in_a_legend(value):
    figure = tfdml.report.map(POINTS[::2], [0] * 5 + [1] * 5, class_names={0: value, 1: "bus"})
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def of_zero_shot(value):
    warned = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(views, "warn_of_indistinct", lambda *arguments: warned.append(arguments[1]))
        evaluate_zero_shot(np.eye(2), [0, 1], np.ones((2, 2)), class_names=[value, "bus"])
    return warned[0].tolist()


def in_a_retriever(image="a", name="bus"):
    gallery = RetrieverItems(np.eye(2), [image, "b"], [name, ""], [{}, {}])
    return gallery.ids, gallery.classes


def of_tokens(value):
    model = TextEmbedder(byte_encoder(16, width=2), ByteTokenizer(16), embedding_dim=2)
    return model.tokenize([value]).tolist()


def of_backend(value):
    backend = Backend()
    backend.embed_texts([value])
    return backend.texts


def in_the_address_of_a_page(value, *_):
    backend = Backend()
    demo = Demo(Pictures("cars", ["a"], np.ones((1, 2))), len, embed_texts=backend.embed_texts)
    routes = page_routes(demo, Lanes(WebSettings()))
    answer = TestClient(application(routes), "http://localhost").get("/", params={"text": value})
    if answer.status_code == 400:
        raise UserError(answer.text)
    return backend.texts


def on_a_command_line(command, monkeypatch, *arguments):
    backend = Backend()
    monkeypatch.setattr(command, "load_source", lambda flags: backend)
    status, _, errors = commands.run(command.__name__.rpartition(".")[2], *arguments)
    if status:
        raise UserError(errors)
    return backend.texts


def in_a_text_file(value, monkeypatch, tmp_path):
    data = value if isinstance(value, bytes) else str(value).encode()
    (tmp_path / "texts.txt").write_bytes(b"\xef\xbb\xbf" + data + b"\r\nbus\n")
    out = tmp_path / str(len(list(tmp_path.iterdir())))
    arguments = ("--model=m", f"--texts={tmp_path / 'texts.txt'}", f"--out={out}")
    return on_a_command_line(embed_command, monkeypatch, *arguments)


def as_a_flag(value, monkeypatch, tmp_path):
    np.save(tmp_path / "gallery.npy", np.ones((1, 2), np.float32))
    arguments = ("--model=m", f"--gallery={tmp_path / 'gallery.npy'}", f"--text={value}")
    return on_a_command_line(search_command, monkeypatch, *arguments)


def in_a_request(value, *_):
    signatures = {"embed_texts": {"texts": tf.TensorSpec((None,), tf.string)}}
    forms = [value, {"b64": base64.b64encode(value.encode()).decode()}]
    request = {"instances": forms, "signature_name": "embed_texts"}
    call = parse_call(json.dumps(request).encode(), signatures, 2)
    first, second = (text.decode() for text in call.inputs["texts"])
    assert first == second
    return [first]


CLASSES = {
    "Index.add y": lambda value: of_index(tens(value)),
    "Index.add class_names": lambda value: of_index(NUMBERS, class_names={0: value, 1: "bus"}),
    "Index.calibrate y": of_a_calibrated_index,
    "RetrievalResults.search labels": lambda value: of_results((value, "bus"), TWO_NAMES[9:11]),
    "RetrievalResults.search gallery_labels": lambda value: of_results(
        TWO_NAMES[9:11], (value, "bus")
    ),
    "RetrievalResults.search class_names": lambda value: of_results(class_names={0: value}),
    "KNNClassifier labels": lambda value: of_classifier(KNNClassifier, value),
    "KNNClassifier.add labels": added,
    "evaluate_classification labels": lambda value: evaluate_classification(
        KNNClassifier(POINTS, TWO_NAMES), POINTS, tens(value)
    ),
    "calibrate labels": lambda value: (
        calibrate(
            QUERIES, tens(value), fpir=0.1, gallery=POINTS, gallery_labels=TWO_NAMES
        ).threshold
    ),
    "identification_rates gallery_labels": lambda value: identification_rates(
        POINTS, TWO_NAMES, 1.0, gallery=POINTS, gallery_labels=tens(value)
    ),
    "paired_differences labels": lambda value: paired_differences(
        {"m": np.arange(20.0)}, {"m": np.zeros(20)}, [value] * 5 + TWO_NAMES[5:]
    ),
    "class_embeddings class_names": lambda value: class_embeddings(
        Backend().embed_texts, [value, "bus"]
    ).tolist(),
    "ImageDataset class_names": lambda value: of_dataset(class_names={0: value, 1: "bus"}),
    "map class_names": in_a_legend,
    "ImageTable class_names": lambda value: ImageTable(
        ("a",), [0], class_names={0: value}
    ).classes.tolist(),
    "evaluate_zero_shot class_names": of_zero_shot,
    "RetrieverItems classes": lambda value: in_a_retriever(name=value),
}
IDS = {
    "Index.add ids": lambda value: of_index(NUMBERS, image_id=value),
    "RetrievalResults.search query_ids": lambda value: of_results(query_ids=[value, "a"]),
    "RetrievalResults.search gallery_ids": lambda value: of_results(gallery_ids=[value, "a"]),
    "RetrievalResults.of_neighbors query_ids": lambda value: of_neighbors(query=value),
    "Neighbors ids": lambda value: of_neighbors(neighbor=value),
    "RetrieverItems ids": lambda value: in_a_retriever(image=value),
    "FileImages paths": lambda value: FileImages((value, "a")).names,
    "EncodedImages names": lambda value: EncodedImages((b"", b""), (value, "a")).names,
    "ArrayImages names": lambda value: ArrayImages(PIXELS, (value, "a")).names,
    "OptionalImages names": lambda value: OptionalImages((value, "a")).names,
}
TEXTS = {
    "ImageDataset texts": lambda value: of_dataset(texts=[value, "bus"]),
    "TextEmbedder.tokenize texts": of_tokens,
    "EmbeddingBackend.embed_texts texts": of_backend,
    "class_embeddings templates": lambda value: class_embeddings(
        Backend().embed_texts, ["bus"], [value + (b"{}" if isinstance(value, bytes) else "{}")]
    ).tolist(),
}
# Of text alone.
WRITTEN_TEXTS = {
    "embed --texts=FILE": in_a_text_file,
    "search --text": as_a_flag,
    "the demo's text=": in_the_address_of_a_page,
    "the texts of a request": in_a_request,
}
PLACES = {**CLASSES, **IDS, **TEXTS}
BAD = {"a byte": b"\xff", "a control character": "a\x00b", "nothing": None, "a fraction": 0.5}
# Items without a class, and queries without a neighbor.
MAY_BE_MISSING = (
    "RetrieverItems classes",
    "RetrievalResults.search class_names",
    "ImageDataset class_names",
    "ImageTable class_names",
    "map class_names",
    "Neighbors ids",
)
NO_NAME = "is no UTF-8|control characters|is empty|must be a text|must be integers"

# Arguments of these names, of texts, that public functions and classes have.
WORDS = {"class_names", "texts", "ids", "query_ids", "gallery_ids", "templates"}
# Those that are no entrances, and why.
WITHIN = {
    "ViewItems texts": "of a data set",
    "require_utf8 texts": "a check",
    "Rows ids": "of a database",
    "class_names_of class_names": "the door itself",
    "plain_texts texts": "the door itself, of galleries",
    "WritableGallery.add ids": "of a database, see tests/retrieval",
    "WritableGallery.delete ids": "of a database, unknown ones are ignored",
    **dict.fromkeys(
        [
            f"{name}.rows ids"
            for name in ("Gallery", "MemoryGallery", "WritableGallery", "Retriever")
        ],
        "unknown ones are ignored",
    ),
    "Neighbors.padded ids": "of a gallery",
    "class_of_each class_names": "of a data set, or of a table",
    "dataset_of class_names": "for ImageDataset",
    "evaluate_views texts": "vectors",
    "EvaluateFlags templates": "for class_embeddings",
    "from_flag_texts texts": "flags",
    "TextEmbedder.embed_texts texts": "for tokenize",
}


@pytest.mark.parametrize("place", [*CLASSES, *TEXTS])
def test_two_unicode_forms_are_one_name(place):
    assert PLACES[place](DECOMPOSED) == PLACES[place](COMPOSED) != PLACES[place]("other")


@pytest.mark.parametrize("place", PLACES)
def test_bytes_are_decoded(place):
    assert PLACES[place](COMPOSED.encode()) == PLACES[place](COMPOSED) != PLACES[place]("other")


@pytest.mark.parametrize("fault", BAD)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_name_is_refused(place, fault):
    if place.endswith("templates") and fault in ("a fraction", "nothing"):
        fault = "a byte"  # these have no place for a name
    if fault == "nothing" and place in MAY_BE_MISSING:
        return
    with pytest.raises(UserError, match=NO_NAME):
        PLACES[place](BAD[fault])


@pytest.mark.parametrize("place", WRITTEN_TEXTS)
def test_texts_of_files_flags_and_requests_are_made_plain(place, monkeypatch, tmp_path):
    read = WRITTEN_TEXTS[place]
    for text in (DECOMPOSED, f" {COMPOSED} "):
        assert read(text, monkeypatch, tmp_path)[0] == COMPOSED
    for text in ("a\u2028b", "a\x85b", "a\x0bb", "a\x0cb"):
        assert read(text, monkeypatch, tmp_path)[0] == text
    with pytest.raises(UserError, match="control characters"):
        read("a\x07b", monkeypatch, tmp_path)


def _arguments_of(node, owner=""):
    """The annotation of each public argument, and of each field of a class, by name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and not child.name.startswith("_"):
            arguments = child.args
            for argument in [*arguments.args, *arguments.kwonlyargs]:
                yield f"{owner}{child.name} {argument.arg}", argument
        elif isinstance(child, ast.AnnAssign) and owner:
            yield f"{owner.rstrip('.')} {ast.unparse(child.target)}", child
        elif isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from _arguments_of(child, f"{child.name}.")


def test_every_public_argument_of_names_is_an_entrance_that_is_tested():
    for file in Path(tfdml.__file__).parent.rglob("*.py"):
        for name, argument in _arguments_of(ast.parse(file.read_text())):
            word = name.split()[-1]
            kind = ast.unparse(argument.annotation) if argument.annotation else ""
            if word in WORDS and re.search(r"\[.*\bstr\b|Any", kind) and name not in WITHIN:
                assert name in PLACES, f"{file}: {name}: {kind}"


def test_roles_are_made_plain_or_refused_and_not_cut():
    table = ImageTable(("a", "b"), roles=[b"query ", "gallery"])
    assert table.roles.tolist() == ["query", "gallery"]
    for role in ("galleries", "", 0.5):
        with pytest.raises(UserError, match="roles"):
            ImageTable(("a", "b"), roles=["query", role])


def test_a_word_for_missing_is_noted_at_every_entrance_of_classes(monkeypatch):
    noted = []
    monkeypatch.setattr(names, "warn", noted.append)
    for place, enter in CLASSES.items():
        noted.clear()
        enter("NA")
        assert any('words for "missing"' in text for text in noted), place
