"""A local web page to try a model: search a gallery by images, filter it, and look at the map of its embeddings."""

from tfdml.demo.application import Demo as Demo
from tfdml.demo.application import application as application
from tfdml.demo.application import embedder_of as embedder_of
from tfdml.demo.application import explainer_of as explainer_of
from tfdml.demo.application import serve as serve
from tfdml.demo.gallery import DatabaseGallery as DatabaseGallery
from tfdml.demo.gallery import Gallery as Gallery
from tfdml.demo.gallery import combined_query as combined_query
from tfdml.demo.gallery import folder_gallery as folder_gallery
from tfdml.demo.gallery import map_of as map_of
from tfdml.demo.gallery import stored_gallery as stored_gallery
