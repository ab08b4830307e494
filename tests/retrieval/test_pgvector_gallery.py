"""PostgreSQL that stops, fills its disk or refuses; writers and readers at once; TLS."""

import contextlib
import datetime
import ipaddress
import os
import pathlib
import shutil
import socket
import ssl
import struct
import subprocess
import threading

import numpy as np
import pytest

from tests.retrieval.databases import postgres, psycopg
from tfdml.errors import UserError
from tfdml.retrieval import EmbeddingsToIndex, connect, index_embeddings

pytestmark = pytest.mark.slow
ROWS = 3000


class Server:
    """A PostgreSQL of its own, which can be stopped and started."""

    def __init__(self, folder):
        self.folder = folder

    def uri(self, table):
        return f"pgvector://postgres@/postgres?socket={self.folder}&table={table}"

    def control(self, *words):
        from pgserver._commands import pg_ctl

        user = "pgserver" if os.geteuid() == 0 else None
        pg_ctl([*words, "-w", "-l", f"{self.folder}/log"], pgdata=self.folder, user=user, timeout=60)

    def stop(self):
        self.control("stop", "-m", "immediate")

    def start(self):
        self.control("start", "-o", '-h ""', "-o", f"-k {self.folder}")

    def run(self, statement):
        with psycopg.connect(host=str(self.folder), user="postgres", autocommit=True) as connection:
            connection.execute(statement)


@pytest.fixture(scope="module")
def server():
    with postgres() as reached:
        if not reached:
            pytest.skip("no pgserver here: it has no wheel for Python 3.13")
        yield Server(pathlib.Path(reached["host"]))


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("vectors") / "vectors.npz"
    vectors = np.random.default_rng(0).normal(size=(ROWS, 32)).astype(np.float32)
    np.savez(path, embeddings=vectors, labels=np.arange(ROWS) % 10)
    return EmbeddingsToIndex.read(path)


@contextlib.contextmanager
def small_batches(uri, rows=100):
    with connect(uri) as gallery:
        gallery.batch_rows = rows
        yield gallery


def assert_whole(uri, stored):
    with connect(uri) as gallery:
        assert len(gallery) == ROWS
        vectors = np.asarray(stored.stored.embeddings[::300])
        assert gallery.search(vectors, k=1).ids[:, 0].tolist() == list(stored.ids[::300])


def test_a_server_that_stops_ends_indexing_and_the_next_one_writes_the_rest(server, stored):
    uri = server.uri("stopped")
    with small_batches(uri) as gallery:
        with pytest.raises(UserError, match=r"cannot be written") as raised:
            index_embeddings(gallery, stored, progress=lambda rows: server.stop() if rows == 1000 else None)
        assert "\n" not in str(raised.value)
        server.start()
        # The same connection is opened again.
        assert index_embeddings(gallery, stored) == ROWS - 1000
        server.control("restart", "-m", "immediate")
        with pytest.raises(UserError, match="cannot be searched"):
            gallery.search(stored.stored.embeddings[:1], k=1)
        assert gallery.search(stored.stored.embeddings[:1], k=1).ids.tolist() == [["0"]]
    assert_whole(uri, stored)


def assert_a_full_disk_is_named_and_indexing_continues(uri, stored, disk):
    """Index on a small disk until it is full, make it larger and index again."""
    with small_batches(uri) as gallery:
        with pytest.raises(UserError, match=r"cannot be written: .*No space left on device") as raised:
            index_embeddings(gallery, stored)
        kept = len(gallery)
        assert 0 < kept < ROWS
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
    with small_batches(uri) as gallery:
        assert index_embeddings(gallery, stored) == ROWS - kept
    assert_whole(uri, stored)
    assert "\n" not in str(raised.value)


def test_a_full_disk_of_postgresql(server, stored):
    place = server.folder.parent / "small"
    place.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tfdml", place]).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        shutil.chown(place, "pgserver")
        server.run(f"CREATE TABLESPACE small LOCATION '{place}'")
        uri = server.uri("full")
        with small_batches(uri) as gallery:
            gallery.upsert(stored.ids[:1], stored.vectors(np.arange(1)), stored.columns(np.arange(1)))
            server.run('ALTER TABLE "full" SET TABLESPACE small')
        assert_a_full_disk_is_named_and_indexing_continues(uri, stored, place)
        server.run('DROP TABLE "full"')
        server.run("DROP TABLESPACE small")
    finally:
        subprocess.run(["umount", "-l", place], check=False)


def test_a_full_disk_of_lancedb(stored, small_disk):
    disk = small_disk(400_000)
    assert_a_full_disk_is_named_and_indexing_continues(f"lancedb://{disk}/full", stored, disk)


@pytest.mark.parametrize("kind", ["pgvector", "lancedb"])
def test_two_writers_and_many_readers(server, stored, kind, tmp_path):
    """Both write all rows into a new table; readers see only whole batches."""
    uri = server.uri("shared") if kind == "pgvector" else f"lancedb://{tmp_path}/shared"
    faults, counts, ended = [], set(), threading.Event()
    begin = threading.Barrier(2)

    def write():
        try:
            with small_batches(uri, 500) as gallery:
                begin.wait()
                index_embeddings(gallery, stored)
        except Exception as error:
            faults.append(error)

    def read():
        while not ended.is_set():
            try:
                with connect(uri) as gallery:
                    if gallery.about is not None:
                        counts.add(len(gallery))
                        gallery.search(stored.vectors(np.arange(1)), k=3)
            except Exception as error:
                faults.append(error)

    readers = [threading.Thread(target=read) for _ in range(6)]
    writers = [threading.Thread(target=write) for _ in range(2)]
    for thread in (*writers, *readers):
        thread.start()
    for thread in writers:
        thread.join()
    ended.set()
    for thread in readers:
        thread.join()
    assert not faults
    assert all(count % 500 == 0 for count in counts)
    assert_whole(uri, stored)


@contextlib.contextmanager
def behind_tls(folder, certificate, key):
    """The port at which the server of a socket is reached over TLS, as if PostgreSQL had been built with it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listener = socket.create_server(("127.0.0.1", 0))

    def copy(source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def serve():
        with contextlib.suppress(OSError):
            while True:
                plain, _ = listener.accept()
                with contextlib.suppress(OSError):
                    assert struct.unpack("!ii", plain.recv(8)) == (8, 80877103)  # SSLRequest
                    plain.sendall(b"S")
                    secure = context.wrap_socket(plain, server_side=True)
                    database = socket.socket(socket.AF_UNIX)
                    database.connect(f"{folder}/.s.PGSQL.5432")
                    for pair in ((secure, database), (database, secure)):
                        threading.Thread(target=copy, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()


def signed(folder, name):
    """The files of a CA, of a certificate for 127.0.0.1 that it signed, and of its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} {part}")]) for part in ("CA", "server")]
    now = datetime.datetime.now(datetime.UTC)
    paths = []
    for part, is_ca in enumerate((True, False)):
        builder = x509.CertificateBuilder(names[0], names[part], keys[part].public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(1)).not_valid_after(now + datetime.timedelta(1))
        builder = builder.add_extension(x509.BasicConstraints(is_ca, None), critical=True)
        own = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        certificate = builder.add_extension(own, critical=False).sign(keys[0], hashes.SHA256())
        paths.append(folder / f"{name}-{part}.pem")
        paths[-1].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    formats = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    paths.append(folder / f"{name}.key")
    paths[-1].write_bytes(keys[1].private_bytes(*formats))
    return paths


def test_tls_and_credentials(server, stored, tmp_path, monkeypatch):
    authority, certificate, key = signed(tmp_path, "own")
    another, *_ = signed(tmp_path, "another")
    server.run("CREATE ROLE reader LOGIN PASSWORD 'right'")
    hba = server.folder / "pg_hba.conf"
    before = hba.read_text()
    hba.write_text("local all reader scram-sha-256\n" + before)
    server.run("SELECT pg_reload_conf()")
    monkeypatch.setenv("PGSSLMODE", "verify-full")
    with behind_tls(server.folder, certificate, key) as port:

        def opened(password, trusted, host="127.0.0.1"):
            monkeypatch.setenv("PGSSLROOTCERT", str(trusted))
            return connect(f"pgvector://reader:{password}@{host}:{port}/postgres?table=none")

        opened("right", authority).close()
        for arguments, reason in (
            (("wrong-secret", authority), "password authentication failed"),
            (("right", another), "certificate verify failed"),
            (("right", tmp_path / "none.pem"), "does not exist"),
            (("right", authority, "localhost"), "does not match host name"),
        ):
            with pytest.raises(UserError, match=reason) as raised:
                opened(*arguments)
            assert "\n" not in str(raised.value)
            assert "secret" not in str(raised.value)
    hba.write_text(before)
    server.run("SELECT pg_reload_conf()")
    server.run("DROP ROLE reader")
