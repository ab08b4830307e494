"""A page to try a model: search a gallery by an uploaded image, or by one of its own."""

from tfdml.demo.application import Demo as Demo
from tfdml.demo.application import embedder_of as embedder_of
from tfdml.demo.application import page_routes as page_routes
from tfdml.demo.application import serve as serve
from tfdml.demo.gallery import Pictures as Pictures
from tfdml.demo.gallery import pictures_of as pictures_of
from tfdml.demo.gallery import pictures_of_gallery as pictures_of_gallery
