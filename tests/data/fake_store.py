"""A folder served as Google Cloud Storage on the loopback, over TLS, through a proxy.

TensorFlow's client of gs:// has fixed host names. It takes a proxy and a certificate from the
environment, so the proxy here answers for these hosts. It is a process of its own: TensorFlow
uploads without releasing Python's lock, and a server among the threads of its process would wait.
"""

import contextlib
import http.server
import json
import pathlib
import re
import socketserver
import ssl
import subprocess
import sys
import urllib.parse

import trustme

HOSTS = ("www.googleapis.com", "storage.googleapis.com")


class _Objects(http.server.BaseHTTPRequestHandler):
    """The JSON API: metadata, lists of objects, their bytes, also in ranges, and uploads."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_CONNECT(self):
        assert self.path.rpartition(":")[0] in HOSTS
        self.send_response(200)
        self.end_headers()
        self.connection = self.server.context.wrap_socket(self.connection, server_side=True)
        self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb", 0)

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        parts = [urllib.parse.unquote(part) for part in url.path.strip("/").split("/")]
        print(self.path, self.headers.get("Range", ""), flush=True)
        if parts[:3] != ["storage", "v1", "b"]:  # /BUCKET/OBJECT: the bytes
            return self._send_object("/".join(parts[1:]))
        if len(parts) == 4:
            return self._send_json({"name": parts[3], "location": "US"})
        if len(parts) == 5:
            return self._send_json(self._list(query.get("prefix", ""), query.get("delimiter")))
        return self._send_metadata("/".join(parts[5:]))

    def do_POST(self):
        """Begin an upload."""
        if not self.server.writable:
            return self._send(403, b"{}")
        self.send_response(200)
        self.send_header("Location", f"https://{HOSTS[0]}{self.path}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_PUT(self):
        name = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)["name"][0]
        file = self.server.folder / name
        content = b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        if "*" not in self.headers.get("Content-Range", ""):  # which asks how much has come
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content)
        self._send(200, b"{}")

    def _list(self, prefix, delimiter):
        names = sorted(name for name in self.server.objects() if name.startswith(prefix))
        rest = {name: name[len(prefix) :] for name in names}
        if delimiter is None:
            return {"items": [{"name": name} for name in names]}
        below = {prefix + r.split("/")[0] + "/" for r in rest.values() if "/" in r}
        items = [{"name": name} for name, r in rest.items() if "/" not in r]
        return {"items": items, "prefixes": sorted(below)}

    def _send_metadata(self, name):
        file = self.server.folder / name
        if not file.is_file():
            return self._send(404, b"{}")
        return self._send_json({
            "name": name, "size": str(file.stat().st_size), "generation": "1",
            "updated": "2024-01-01T00:00:00.000Z",
        })  # fmt: skip

    def _send_object(self, name):
        file = self.server.folder / name
        if not file.is_file():
            return self._send(404, b"")
        content = file.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None:
            return self._send(200, content)
        first, last = int(wanted[1]), int(wanted[2])
        part = content[first : last + 1]
        return self._send(206 if part else 416, part)

    def _send_json(self, answer):
        self._send(200, json.dumps(answer).encode())

    def _send(self, code, content):
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True

    def objects(self):
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return [path.relative_to(self.folder).as_posix() for path in files]


@contextlib.contextmanager
def served(folder, monkeypatch, tmp_path, *, writable=True):
    """Serve `folder` as the bucket of every name to TensorFlow; at the end, add to the list that it
    yields the paths that TensorFlow has asked for.
    """
    authority, requests = tmp_path / "authority.pem", []
    words = [__file__, str(folder), str(authority), str(int(writable))]
    server = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    try:
        port = server.stdout.readline().strip()
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("CURL_CA_BUNDLE", str(authority))
        monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
        monkeypatch.setenv("NO_GCE_CHECK", "true")
        monkeypatch.setenv("no_proxy", "")
        yield requests
    finally:
        server.terminate()
        requests += server.communicate()[0].splitlines()


def _serve(folder, authority_file, writable):
    """Print the port, then each path that is asked for."""
    authority = trustme.CA()
    server = _Server(("127.0.0.1", 0), _Objects)
    server.folder, server.writable = pathlib.Path(folder), bool(int(writable))
    server.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*HOSTS).configure_cert(server.context)
    authority.cert_pem.write_to_path(authority_file)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
