"""``reward=remote``: a server scores, asked by HTTP. docs/use/rewards.md has the schema, examples/reward_server.py a server.

A request is ``POST`` with JSON, ``{"samples": [{"id": "17.3", "prompt": ..., "response": ..., "label": ..., "metadata": {...}}, ...]}``:
samples of one prompt, at most ``batch``. The answer: ``{"rewards": [{"id": "17.3", "reward": 1.0}, ...]}``, every id once, in any
order; ``reward`` is a finite number, or an object of named parts.

A request that times out, cannot connect, or is answered with 408, 429, 5xx or anything that is no such answer is tried again, after
``backoff_s``, twice that, and so on. After ``retries`` the reward gives up: ``reward.on_timeout`` says what then becomes of the samples;
their group is left out unless it is set. Another status (401, 404, a redirect) is a mistake, and an error. ``reward.timeout_s`` bounds all
of it.
"""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rlbatch.api import ConfigError, Count, CountOrZero, Reward, RewardError, RewardSpec, Sample, Score, Seconds, Unscored, hookimpl
from rlbatch.api.values import option

LARGEST = 1 << 26
"""Most bytes of an answer."""
LONGEST_WAIT_S = 30.0
PASSING = frozenset({408, 429})
"""Statuses below 500 that are tried again."""


@dataclass(frozen=True)
class _Options:
    url: str = option("", "Where the server is, http or https.")
    batch: Count = option(64, "Most samples of a request.")
    concurrency: Count = option(4, "Requests at once for a group; reward.workers groups are at once.")
    retries: CountOrZero = option(3, "Further tries of a request.")
    backoff_s: Seconds = option(0.5, "Wait before the first of these, seconds; doubled for each.")
    request_timeout_s: Seconds = option(20.0, "Longest wait for a sign of the server, seconds.")
    token_variable: str = option("", "Environment variable with a token, sent as `Authorization: Bearer`.")


class _Failed(Exception):
    """A failed request that may succeed when it is tried again."""


def _build(options: _Options) -> Reward:
    if not options.url.startswith(("http://", "https://")):
        raise ConfigError(f"reward.options.url={options.url}: must begin with http:// or https://. Say where the server is.")

    def remote(samples: Sequence[Sample]) -> list[Score]:
        batches = [samples[start : start + options.batch] for start in range(0, len(samples), options.batch)]
        with ThreadPoolExecutor(min(options.concurrency, len(batches))) as pool:
            return [score for scores in pool.map(lambda batch: _asked(options, batch), batches) for score in scores]

    return remote


def _asked(options: _Options, samples: Sequence[Sample]) -> list[Score]:
    """The scores of a batch, in order."""
    ids = [f"{sample.prompt.prompt_id}.{sample.sample_index}" for sample in samples]
    said = [
        {
            "id": name,
            "prompt": sample.prompt.text,
            "response": sample.response,
            "label": sample.prompt.label,
            "metadata": dict(sample.prompt.metadata),
        }
        for name, sample in zip(ids, samples, strict=True)
    ]
    body = json.dumps({"samples": said}, default=str).encode()
    for tried in range(options.retries + 1):
        try:
            return _read(_post(options, body), ids)
        except _Failed as error:
            last = error
        if tried < options.retries:
            time.sleep(min(options.backoff_s * 2.0**tried, LONGEST_WAIT_S))
    raise Unscored(f"{options.url} gave no rewards in {options.retries + 1} tries, at last: {last}") from last


def _post(options: _Options, body: bytes) -> bytes:
    import urllib.error  # with HTTP and TLS: only where something is sent
    import urllib.request

    headers = {"Content-Type": "application/json"}
    if options.token_variable:
        headers["Authorization"] = f"Bearer {os.environ.get(options.token_variable, '')}"
    request = urllib.request.Request(options.url, body, headers)

    class Stay(urllib.request.HTTPRedirectHandler):
        """Follows no redirects: a redirected POST would arrive as a GET without samples, and take the token to another server."""

        def redirect_request(self, *args: Any) -> None:
            """Follows none."""

    try:
        with urllib.request.build_opener(Stay).open(request, timeout=options.request_timeout_s) as answer:
            content: bytes = answer.read(LARGEST + 1)
    except urllib.error.HTTPError as error:
        if error.code < 500 and error.code not in PASSING:
            raise RewardError(f"{options.url} answered {error.code} {error.reason}. Correct the url, the token or the server.") from error
        raise _Failed(f"status {error.code}") from error
    except (OSError, ValueError) as error:  # URLError, time-outs and what is no HTTP
        raise _Failed(f"{type(error).__name__}: {error}") from error
    except Exception as error:  # http.client's own errors
        raise _Failed(f"{type(error).__name__}: {error}") from error
    if len(content) > LARGEST:
        raise _Failed(f"more than {LARGEST} bytes")
    return content


def _read(content: bytes, ids: Sequence[str]) -> list[Score]:
    """The rewards in an answer, in the order of ``ids``."""
    try:
        rows = json.loads(content)["rewards"]
        found = {row["id"]: row["reward"] for row in rows}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _Failed(f"no answer of the schema ({type(error).__name__}: {error})") from error
    if len(rows) != len(ids) or set(found) != set(ids):
        raise _Failed(f"rewards for {len(set(ids) & set(found))} of {len(ids)} samples, in {len(rows)} rows")
    for name, score in found.items():
        values = list(score.values()) if isinstance(score, dict) else [score]
        if not values or not all(_is_number(value) for value in values):
            raise _Failed(f"the reward of {name} is {str(score)[:80]}, no finite number")
    return [found[name] for name in ids]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@hookimpl
def rlbatch_register_rewards() -> Mapping[str, RewardSpec]:
    """Supplies ``remote``."""
    return {"remote": RewardSpec(_build, _Options, unscored="drop_group", timeout_s=300.0)}
