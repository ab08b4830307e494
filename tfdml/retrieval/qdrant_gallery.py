"""Qdrant: its server, or its client's local mode, which compares every query with every row in Python."""

import json
import os
import uuid
from typing import Any

import numpy as np
from qdrant_client import QdrantClient, models
from qdrant_client.http.exceptions import ApiException, ResponseHandlingException, UnexpectedResponse

from tfdml.errors import UserError
from tfdml.retrieval.database import About, GalleryDatabase, Rows

# Qdrant's ids are numbers or UUIDs: this one, of the text that the gallery calls it.
_NAMES = uuid.UUID("6f1d1ee4-5b0f-4c6e-9f62-0f7f2d6d9a53")
_SECONDS = 60


class QdrantGallery(GalleryDatabase):
    """A gallery in Qdrant.

    Args:
        address: `qdrant://:key@host:port`, by https where there is a key or `?tls=true`; or `qdrant:///folder` for the
            local mode of its client, which is meant for trying out.
    """

    _errors = (ApiException, ResponseHandlingException, UnexpectedResponse, OSError, RuntimeError, ValueError)
    batch_rows = 1000
    _client: Any = None

    def _open(self) -> str | bytes | None:
        address = self.address
        if address.further.get("tls", "true") not in ("true", "false"):
            raise UserError(f"`uri={address}`: tls must be true or false")
        if address.host:
            self._client = QdrantClient(
                host=address.host,
                port=address.port or 6333,
                api_key=address.password or None,
                # A key goes over the net in the clear only where that is said.
                https=address.further.get("tls", "true" if address.password else "false") == "true",
                timeout=_SECONDS,
                check_compatibility=False,
            )
        elif address.index:
            raise UserError(f"`uri={address}`: the local mode searches exactly; leave `index` out, or name a server")
        elif not os.path.isdir(address.path):
            return None
        else:
            self._client = QdrantClient(path=address.path)
        if not self._client.collection_exists(address.table):
            return None
        metadata = self._client.get_collection(address.table).config.metadata or {}
        return json.dumps(metadata["about"]) if "about" in metadata else ""

    def _create(self, about: About) -> None:
        if self._client is None:
            self._client = QdrantClient(path=self.address.path)
        links = self.address.options.get("links")
        distance = models.Distance.DOT if self._by_product else models.Distance.EUCLID
        self._client.create_collection(
            self.address.table,
            vectors_config=models.VectorParams(size=about.dimension, distance=distance),
            hnsw_config=models.HnswConfigDiff(m=links) if links else None,
            metadata={"about": json.loads(about.text())},
        )

    def _upsert(self, rows: Rows) -> None:
        columns = {"id": rows.ids, **rows.attributes}
        payloads = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        points = models.Batch(ids=[_key(name) for name in rows.ids], vectors=rows.vectors.tolist(), payloads=payloads)
        self._client.upsert(self.address.table, points, wait=True)

    def _delete(self, ids: list[str]) -> int:
        keys: list[Any] = [_key(name) for name in ids]
        there = len(self._client.retrieve(self.address.table, keys, with_payload=False))
        self._client.delete(self.address.table, models.PointIdsList(points=keys), wait=True)
        return there

    def _nearest(self, vectors: np.ndarray, k: int, conditions: dict[str, Any]) -> list[Rows]:
        parameters = None
        if self.address.host:
            effort = self.address.options.get("effort")
            parameters = models.SearchParams(exact=not self.approximate, hnsw_ef=max(effort, k) if effort else None)
        requests = [
            models.QueryRequest(
                query=vector.tolist(),
                limit=k,
                filter=_where(conditions),
                params=parameters,
                with_vector=True,
                with_payload=True,
            )
            for vector in vectors
        ]
        answers = self._client.query_batch_points(self.address.table, requests)
        return [self._read(answer.points) for answer in answers]

    def _count(self, conditions: dict[str, Any]) -> int:
        return int(self._client.count(self.address.table, _where(conditions), exact=True).count)

    def _rows(self, most: int) -> Rows:
        found: list[Any] = []
        after = None
        while len(found) < most:
            points, after = self._client.scroll(
                self.address.table, limit=min(most - len(found), self.batch_rows), offset=after, with_vectors=True
            )
            found += points
            if after is None:
                break
        return self._read(found)

    def _read(self, points: list[Any]) -> Rows:
        about = self.existing()
        vectors = np.array([point.vector for point in points], np.float32).reshape(-1, about.dimension)
        attributes = {name: [point.payload[name] for point in points] for name in about.attributes}
        return Rows([point.payload["id"] for point in points], vectors, attributes)

    def _indexes(self) -> list[tuple[str, dict[str, int]]]:
        return [("hnsw", {"links": self._client.get_collection(self.address.table).config.hnsw_config.m})]

    def _optimize(self) -> None:
        """Its server builds its graph by itself, in the background; filters are quicker with an index of theirs."""
        if self.address.host:
            if links := self.address.options.get("links"):
                self._client.update_collection(self.address.table, hnsw_config=models.HnswConfigDiff(m=links))
            kinds = {"integer": models.PayloadSchemaType.INTEGER, "text": models.PayloadSchemaType.KEYWORD}
            for name, kind in self.existing().attributes.items():
                self._client.create_payload_index(self.address.table, name, kinds[kind], wait=True)

    def _close(self) -> None:
        if self._client is not None:
            self._client.close()


def _key(name: str) -> str:
    return str(uuid.uuid5(_NAMES, name))


def _where(conditions: dict[str, Any]) -> Any:
    if not conditions:
        return None
    return models.Filter(
        must=[
            models.FieldCondition(key=name, match=models.MatchValue(value=value)) for name, value in conditions.items()
        ]
    )
