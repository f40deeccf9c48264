"""Serve an index over HTTP with nothing but Python: vectors in, ids and scores out.

    python examples/serve.py index.faiss --port 8000
    curl localhost:8000 -d '{"vectors": [[0.1, 0.2, …]], "k": 5}'

The file is checked against its record before the first query: a damaged one is not served.
"""

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

from givens.export.faiss import inverted, load_index


class Handler(BaseHTTPRequestHandler):
    """Answers a POST of {"vectors": [[…], …], "k": 10}."""

    def do_POST(self) -> None:
        """Search, or say what is wrong with the question."""
        try:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked = np.array(body["vectors"], np.float32)
            k, index = int(body.get("k", 10)), self.server.index
            if asked.ndim != 2 or asked.shape[1] != index.d or not np.isfinite(asked).all():
                raise ValueError(f"vectors must be rows of {index.d} finite numbers")
            if not 1 <= k <= index.ntotal:
                raise ValueError(f"k must be in 1..{index.ntotal}, but got {k}")
            scores, ids = index.search(asked, k)
            self.reply(200, {"ids": ids.tolist(), "scores": scores.tolist()})
        except (ValueError, KeyError, TypeError) as error:
            self.reply(400, {"error": str(error)})

    def reply(self, status: int, answer: dict) -> None:
        """Send JSON."""
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def server(path: str, port: int, nprobe: int = 16) -> ThreadingHTTPServer:
    """A server of the index at `path`, which has still to be started."""
    made = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    made.index = load_index(path).index
    if lists := inverted(made.index):
        lists.nprobe = min(nprobe, lists.nlist)
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("index")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    with server(options.index, options.port) as running:
        print(f"{running.index.ntotal:,} vectors at http://127.0.0.1:{options.port}")
        running.serve_forever()
