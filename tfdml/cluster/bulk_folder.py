"""The folder of a bulk pass: which images each part has, which parts are done, and the manifest at the end.

progress.json           begun: the identity, how many images and parts there are
plan/part-000007.parquet   the images of a part, listed once, so that a later start embeds the same ones
done/part-000007.json   written when the part's embeddings are: rows, checksum, bad images
part-000007.parquet     the embeddings
manifest.json, bad_images.csv   at the end; plan/ and done/ are then removed
"""

from __future__ import annotations

import contextlib
import csv
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tfdml.cluster import inputs
from tfdml.embeddings import parquet
from tfdml.embeddings.reader import FORMAT, PROGRESS, VERSION
from tfdml.embeddings.writer import read_state, tidy, write_manifest
from tfdml.errors import UserError
from tfdml.io.files import atomic_write, locked, sha256_of, sweep, write_json
from tfdml.io.manifests import read_json

BAD_IMAGES = "bad_images.csv"
_KINDS = {"rows": int, "dimension": int, "bytes": int, "sha256": str, "bad": list}


class BulkFolder:
    """Where a bulk pass writes; the driver and the workers each have one.

    Args:
        folder: A local folder, or one that all machines have mounted at the same place.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder).absolute()
        self.count = self.parts = 0

    @contextlib.contextmanager
    def begun(self, source: str, identity: Mapping[str, Any], rows: int) -> Iterator[dict[str, Any]]:
        """Keep other processes out, and list the images where that is not done; a context manager.

        Args:
            source: See `inputs.listed`.
            identity: What decides the embeddings.
            rows: Images of a part.

        Yields:
            The manifest, where the folder is finished; else nothing.

        Raises:
            UserError: It holds something else, is being written, or was begun with another identity; there is no image.
        """
        read_state(self.folder, identity)
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder, "folder"):
            tidy(self.folder)
            manifest, progress = read_state(self.folder, identity)
            if not manifest:
                if not progress.get("parts"):
                    progress = self._plan(source, identity, rows)
                self.count, self.parts = progress["count"], progress["parts"]
                for name in ("plan", "done"):
                    sweep(self.folder / name)
            yield manifest

    def _plan(self, source: str, identity: Mapping[str, Any], rows: int) -> dict[str, Any]:
        # The keys of another writer's progress, too, so that either refuses the other's folder by its identity.
        progress = {"format": FORMAT, "version": VERSION, "identity": dict(identity)}
        progress |= {"dimension": 0, "files": {}, "count": 0, "parts": 0}
        plan = self.folder / "plan"
        try:
            write_json(self.folder / PROGRESS, progress)
            shutil.rmtree(plan, ignore_errors=True)
            plan.mkdir()
            (self.folder / "done").mkdir(exist_ok=True)
            for part, images in enumerate(inputs.in_parts(inputs.listed(source), rows)):
                first, count = part * rows, len(images["path"])
                kinds = {"label": pa.int64(), "path": pa.string(), "class": pa.string(), "role": pa.string()}
                columns = {name: pa.array(values, kinds[name]) for name, values in images.items()}
                with atomic_write(plan / parquet.part_name(part)) as temporary:
                    pq.write_table(pa.table({"id": pa.array(range(first, first + count)), **columns}), temporary)
                progress |= {"count": first + count, "parts": part + 1}
            if not progress["count"]:
                raise UserError(f"`input={source}` names no image")
        except BaseException:
            for name in (PROGRESS, "plan", "done"):
                path = self.folder / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            raise
        write_json(self.folder / PROGRESS, progress)
        return progress

    def images(self, part: int) -> dict[str, list]:
        """The images of a part, for `parquet.table_of`.

        Raises:
            UserError: This machine does not see the folder.
        """
        path = self.folder / "plan" / parquet.part_name(part)
        try:
            return pq.ParquetFile(path).read().to_pydict()
        except (OSError, pa.ArrowException) as error:
            raise UserError(
                f"`folder={self.folder}`: a worker on {platform.node()} cannot read {path}; name a folder that "
                "every machine of the cluster has mounted at the same place"
            ) from error

    def write(self, part: int, table: Any, bad: list[list]) -> dict[str, Any]:
        """Write the embeddings of a part atomically, then the record that it is done.

        Args:
            part: Its number.
            table: Of `parquet.table_of`; None where no image could be read.
            bad: (id, path, reason) of the images that could not.

        Returns:
            What `done` holds of it.
        """
        about = {"rows": 0, "dimension": 0, "bytes": 0, "sha256": "", "bad": bad}
        path = self.folder / parquet.part_name(part)
        if table is not None:
            with atomic_write(path) as temporary:
                parquet.write_file(temporary, table)
            dimension = table.schema.field("embedding").type.list_size
            about |= {"rows": table.num_rows, "dimension": dimension}
            about |= {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        write_json(self._done(part), about)
        return about

    def _done(self, part: int) -> Path:
        return self.folder / "done" / parquet.part_name(part).replace(".parquet", ".json")

    def pending(self) -> list[int]:
        """The parts that are not done."""
        done = {entry.name for entry in os.scandir(self.folder / "done")}
        return [part for part in range(self.parts) if self._done(part).name not in done]

    def finish(self, about: Mapping[str, Any], identity: Mapping[str, Any], dtype: str) -> dict[str, Any]:
        """Write the list of bad images and, last of all, the manifest.

        Raises:
            UserError: No image could be read; the parts differ in dimension.
        """
        files: dict[str, Any] = {}
        dimensions, bad, rows = set(), [], 0
        for part in range(self.parts):
            facts = read_json(self._done(part), _KINDS)
            bad += facts["bad"]
            if facts["rows"]:
                name = parquet.part_name(part)
                files[name] = {"sha256": facts["sha256"], "rows": facts["rows"]}
                dimensions.add(facts["dimension"])
                rows += facts["rows"]
        if not rows:
            raise UserError(f"none of the {self.count:,} images can be read; the first: {bad[0][1]}: {bad[0][2]}")
        if len(dimensions) > 1:
            raise UserError(f"{self.folder} holds embeddings of {sorted(dimensions)} dimensions; delete it")
        with atomic_write(self.folder / BAD_IMAGES) as path, open(path, "w", encoding="utf-8", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerows([["id", "path", "reason"], *bad])
        files[BAD_IMAGES] = {"sha256": sha256_of(self.folder / BAD_IMAGES)}
        about = {"bad_images": len(bad), **about}
        manifest = write_manifest(self.folder, identity, rows, dimensions.pop(), dtype, about, files)
        (self.folder / PROGRESS).unlink()
        for name in ("plan", "done"):
            shutil.rmtree(self.folder / name)
        return manifest

    def done(self) -> dict[str, int]:
        """The images of the parts that are done: embedded ones as `rows`, others as `bad`."""
        total = {"rows": 0, "bad": 0}
        pending = set(self.pending())
        for part in range(self.parts):
            if part not in pending:
                facts = read_json(self._done(part), _KINDS)
                total["rows"] += facts["rows"]
                total["bad"] += len(facts["bad"])
        return total
