"""A reward server for `reward=remote`, of the standard library: `python examples/reward_server.py 8000`, then
`reward=remote reward.options.url=http://localhost:8000`. It scores 1 where the label is in the response. It is for one machine: it has no
encryption, and asks nobody who they are.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def score(sample: dict) -> float:
    """Yours: of `prompt`, `response`, `label` and `metadata`."""
    return float(str(sample["label"]) in sample["response"])


class Handler(BaseHTTPRequestHandler):
    """Answers one request after the other, each in a thread."""

    def do_POST(self) -> None:
        """Scores what was sent."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        rewards = [{"id": sample["id"], "reward": score(sample)} for sample in asked["samples"]]
        body = json.dumps({"rewards": rewards}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    ThreadingHTTPServer(("localhost", int(sys.argv[1])), Handler).serve_forever()
