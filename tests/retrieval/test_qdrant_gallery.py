"""What a Qdrant server is asked for."""

import pytest

from tfdml.retrieval import connect


@pytest.mark.filterwarnings("ignore:Local mode performs exact")
def test_a_qdrant_server_gets_the_graph_and_the_effort_of_the_address(monkeypatch, few):
    """Of a client that answers from memory, as its server would."""
    from qdrant_client import QdrantClient  # 40 MB, which other processes of the tests need not take

    from tfdml.retrieval import qdrant_gallery

    asked = {}

    class Recorded(QdrantClient):
        def __init__(self, host, **_):
            super().__init__(":memory:")

        def create_collection(self, name, hnsw_config, **options):
            asked["built"] = hnsw_config.m
            return super().create_collection(name, hnsw_config=hnsw_config, **options)

        def update_collection(self, name, hnsw_config, **options):
            asked["rebuilt"] = hnsw_config.m
            return super().update_collection(name, hnsw_config=hnsw_config, **options)

        def get_collection(self, name, **options):
            answer = super().get_collection(name, **options)
            answer.config.hnsw_config.m = asked.get("rebuilt", asked["built"])
            return answer

        def query_batch_points(self, name, requests, **options):
            asked["search"] = {(request.params.exact, request.params.hnsw_ef) for request in requests}
            return super().query_batch_points(name, requests, **options)

    monkeypatch.setattr(qdrant_gallery, "QdrantClient", Recorded)
    with connect("qdrant://host?index=hnsw&links=7&effort=33") as gallery:
        gallery.upsert(list(map(str, range(300))), few)
        gallery.search(few[:2], k=3)
        assert asked == {"built": 7, "search": {(False, 33)}}
        gallery.address.options["links"] = 9
        gallery.optimize()
        gallery.search(few[:2], k=3)
        assert asked["rebuilt"] == 9
