"""A double of an S3 server on loopback: one bucket, listed and read; it checks no signature."""

import contextlib
import http.server
import threading
import urllib.parse
from xml.sax.saxutils import escape

BUCKET = "photos"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer(body=False)

    def do_GET(self):
        self._answer(body=True)

    def _answer(self, body):
        url = urllib.parse.urlsplit(self.path)
        bucket, _, key = urllib.parse.unquote(url.path).lstrip("/").partition("/")
        objects = self.server.objects
        if bucket != BUCKET or (key and key not in objects):
            return self._send(404, b"", body)
        if not key:
            query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
            return self._send(200, self._listing(query) if "list-type" in query else b"", body)
        data = objects[key]
        first, last = 0, len(data) - 1
        if "Range" in self.headers:
            asked = self.headers["Range"].removeprefix("bytes=").split("-")
            first, last = int(asked[0]), min(int(asked[1] or last), last)
        return self._send(206 if "Range" in self.headers else 200, data[first : last + 1], body)

    def _listing(self, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        keys, folders = [], set()
        for key in sorted(self.server.objects):
            rest = key.removeprefix(prefix)
            if key.startswith(prefix) and delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
            elif key.startswith(prefix):
                keys.append(key)
        stamp = "<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>e</ETag>"
        shown = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.server.objects[key])}</Size>{stamp}</Contents>"
            for key in keys
        )
        shown += "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders)
        )
        head = f"<Name>{BUCKET}</Name><KeyCount>{len(keys) + len(folders)}</KeyCount><IsTruncated>false</IsTruncated>"
        return f'<?xml version="1.0"?><ListBucketResult>{head}{shown}</ListBucketResult>'.encode()

    def _send(self, status, data, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("ETag", '"e"')
        self.end_headers()
        if body:
            self.wfile.write(data)


@contextlib.contextmanager
def serving(objects):
    """The address of a server that holds `objects`, bytes by key."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.objects = objects
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
