"""Formats are told from first bytes, the same in Python and in the graph."""

import io

import pytest
import tensorflow as tf
from PIL import Image

from tfdml.data.images.decoding import is_format
from tfdml.data.images.formats import EXTENSIONS, FORMATS, format_of


def encoded(form):
    buffer = io.BytesIO()
    Image.new("RGB", (3, 2)).save(buffer, form)
    return buffer.getvalue()


FILES = {form: encoded(form) for form in ("jpeg", "png", "webp", "gif", "bmp", "tiff")} | {
    "wave": b"RIFF\x24\0\0\0WAVEfmt ",
    "cut off": b"RIFF\x24\0",
    "start of a JPEG": b"\xff\xd8",
    "empty": b"",
}


@pytest.mark.parametrize("name", FILES)
def test_the_format_of_a_file(name):
    head = FILES[name][:16]
    known = [form.name for form in FORMATS if form.matches(head)]
    assert known == ([name] if name in ("jpeg", "png", "webp", "gif", "bmp") else [])
    assert format_of(head) == next((form for form in FORMATS if form.name == name), None)
    in_graph = [form.name for form in FORMATS if is_format(tf.constant(FILES[name]), form)]
    assert in_graph == known


def test_extensions_are_lower_case_and_belong_to_one_format():
    assert len(set(EXTENSIONS)) == len(EXTENSIONS) == sum(len(form.extensions) for form in FORMATS)
    assert all(extension == extension.lower() and extension[0] == "." for extension in EXTENSIONS)
