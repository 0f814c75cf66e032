"""``reward=remote`` against servers that behave and servers that do not, over real HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from examples.reward_server import Handler as ExampleHandler
from rlbatch.api import ConfigError, Prompt, RewardError, Sample, Unscored
from rlbatch.rewards.score import scores_of
from tests.plugins.reward_cases import registry

Answer = Callable[[list[dict[str, Any]], int], tuple[int, bytes]]
"""Of the samples that were asked for and the number of the request: status and body."""


class Server:
    """On a port of its own, in a thread."""

    def __init__(self, answer: Answer | None) -> None:
        self.requests: list[list[str]] = []
        self.headers: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
                outer.requests.append([row["id"] for row in asked])
                outer.headers.append(dict(self.headers))
                assert answer is not None
                status, body = answer(asked, len(outer.requests))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Location", "/elsewhere")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                """Not into the test's output."""

        self._server = ThreadingHTTPServer(("localhost", 0), Handler if answer else ExampleHandler)
        self._server.daemon_threads = False  # closing waits for them: a later test would find what they say in its own output
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://localhost:{self._server.server_address[1]}/score"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[[Answer | None], Server]]:
    servers: list[Server] = []

    def start(answer: Answer | None) -> Server:
        servers.append(Server(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def rewards(url: str, count: int = 4, **options: Any) -> list[tuple[float, dict[str, float]]]:
    prompt = Prompt(7, "text", (1,), "5", metadata={"level": 3})
    samples = [Sample(prompt, index, [], [], [], f"it is {index}", "stop") for index in range(count)]  # type: ignore[arg-type]
    reward = registry().build_reward("remote", {"url": url, "backoff_s": 0.01, **options})
    return scores_of("remote", reward, samples)


def rows(asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As right as can be: each sample's index."""
    return [{"id": row["id"], "reward": float(row["response"][-1])} for row in asked]


def body(found: Any) -> bytes:
    return json.dumps({"rewards": found}).encode()


def test_the_schema(serve: Callable[[Answer | None], Server]) -> None:
    """In batches; another order and named parts do not matter."""

    def answer(asked: list[dict[str, Any]], number: int) -> tuple[int, bytes]:
        assert all((row["prompt"], row["label"], row["metadata"]) == ("text", "5", {"level": 3}) for row in asked)
        found = rows(asked)[::-1]
        found[0]["reward"] = {"correct": found[0]["reward"], "form": 0.5}
        return 200, body(found)

    server = serve(answer)
    got = rewards(server.url, 5, batch=2, concurrency=2)
    assert [score for score, _ in got] == [0.0, 1.5, 2.0, 3.5, 4.5]
    assert got[1][1] == {"correct": 1.0, "form": 0.5}
    assert sorted(server.requests) == [["7.0", "7.1"], ["7.2", "7.3"], ["7.4"]]


def test_the_example_server(serve: Callable[[Answer | None], Server]) -> None:
    """examples/reward_server.py speaks the schema."""
    assert [score for score, _ in rewards(serve(None).url, 6)] == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (lambda asked: (500, b""), "status 500"),
        (lambda asked: (429, b""), "status 429"),
        (lambda asked: (200, body(rows(asked)[:2])), "rewards for 2 of 4 samples"),
        (lambda asked: (200, body([*rows(asked), rows(asked)[0]])), "in 5 rows"),
        (lambda asked: (200, body([{**row, "id": "x"} for row in rows(asked)])), "rewards for 0 of 4 samples"),
        (lambda asked: (200, b'{"rewards": [{"id": "7.0", "reward": NaN}]}'), "rewards for 1 of 4"),
        (lambda asked: (200, body([{**row, "reward": float("nan")} for row in rows(asked)])), "no finite number"),
        (lambda asked: (200, body([{**row, "reward": "1"} for row in rows(asked)])), "no finite number"),
        (lambda asked: (200, body([{**row, "reward": {}} for row in rows(asked)])), "no finite number"),
        (lambda asked: (200, b"<html>"), "no answer of the schema"),
        (lambda asked: (200, b"[]"), "no answer of the schema"),
        (lambda asked: (200, b"[" * 100_000), "no answer of the schema"),
        (lambda asked: (200, b""), "no answer of the schema"),
    ],
)
def test_what_is_tried_again(serve: Callable[[Answer | None], Server], broken: Any, why: str) -> None:
    """A failure that passes costs nothing; one that stays makes the reward give up, with the last reason."""
    passing = serve(lambda asked, number: broken(asked) if number < 3 else (200, body(rows(asked))))
    assert [score for score, _ in rewards(passing.url)] == [0.0, 1.0, 2.0, 3.0]
    assert len(passing.requests) == 3
    staying = serve(lambda asked, number: broken(asked))
    with pytest.raises(RewardError, match=f"raised Unscored: .* gave no rewards in 2 tries, at last: .*{why}") as caught:
        rewards(staying.url, retries=1)
    assert isinstance(caught.value.__cause__, Unscored)
    assert len(staying.requests) == 2


def test_one_that_hangs_and_one_that_is_away(serve: Callable[[Answer | None], Server]) -> None:
    """Both end as a failure that may pass does."""
    given_up = threading.Event()
    hanging = serve(lambda asked, number: (given_up.wait(60), (200, b""))[1])
    for url in (hanging.url, "http://localhost:1/"):
        with pytest.raises(RewardError, match="gave no rewards in 1 tries") as caught:
            rewards(url, retries=0, request_timeout_s=0.2)
        assert isinstance(caught.value.__cause__, Unscored)
    given_up.set()


def test_a_mistake_is_an_error_at_once(serve: Callable[[Answer | None], Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """404, 401 and redirects do not pass by waiting; the token is sent there and nowhere else, and in no message."""
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    server = serve(lambda asked, number: (404, b""))
    with pytest.raises(RewardError, match="answered 404 Not Found") as caught:
        rewards(server.url, token_variable="MY_TOKEN")
    assert not isinstance(caught.value.__cause__, Unscored)
    assert "s3cret" not in str(caught.value)
    assert server.headers[0]["Authorization"] == "Bearer s3cret"
    assert len(server.requests) == 1
    moved = serve(lambda asked, number: (302, b""))
    with pytest.raises(RewardError, match="answered 302 Found"):
        rewards(moved.url, token_variable="MY_TOKEN")
    assert len(moved.requests) == 1
    with pytest.raises(ConfigError, match=r"reward\.options\.url=: must begin with http"):
        registry().build_reward("remote", {})
