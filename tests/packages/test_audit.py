"""`make audit`: what it ends with, by the real pip-audit and a database of vulnerabilities that this test keeps."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build/packaging/bin/python"
BAD = "2.0"
RANGE = {"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "2.1"}]}


class Database(BaseHTTPRequestHandler):
    """OSV's query, for one package."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        known = {
            "id": "PYSEC-2026-1",
            "modified": "2026-01-01T00:00:00Z",
            "affected": [{"package": asked["package"], "ranges": [RANGE]}],
        }
        body = json.dumps({"vulns": [known]} if asked["version"] == BAD else {}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Database)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/query"
    server.shutdown()
    server.server_close()


def audit(lock: str, tmp_path: Path, *options: str) -> tuple[int, str, str]:
    file = tmp_path / "lock.txt"
    file.write_text(lock)
    words = [PYTHON, ROOT / "scripts/audit", *options, "-r", file, "--cache-dir", tmp_path / "cache"]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


def test_what_is_known_is_named_and_fails(database: str, tmp_path: Path) -> None:
    options = ("-s", "osv", "--osv-url", database)
    code, said, _ = audit(f"idna==3.0\nwaitress=={BAD}\n", tmp_path, *options)
    assert (code, said.splitlines()) == (
        1,
        ["waitress 2.0: PYSEC-2026-1; fixed in 2.1", "2 of 2 packages looked up, 1 with a known vulnerability"],
    )
    code, said, _ = audit("idna==3.0\n", tmp_path, *options)
    assert (code, said) == (0, "1 of 1 packages looked up, 0 with a known vulnerability\n")


def test_an_audit_that_looked_at_nothing_has_not_passed(tmp_path: Path) -> None:
    """A version that no index has; and a database that is not there."""
    code, said, error = audit("idna==0.0.1+nowhere\n", tmp_path)
    assert (code, "0 of 1 packages looked up" in said, "NOT AUDITED" in error) == (2, True, True), said + error
    code, _, error = audit("idna==3.0\n", tmp_path, "-s", "osv", "--osv-url", "http://127.0.0.1:9/")
    assert (code, bool(error)) == (2, True)
