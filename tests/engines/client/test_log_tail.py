"""What errors quote of an engine's log."""

from __future__ import annotations

from pathlib import Path

from rlbatch.engines.client.log_tail import LINE_LENGTH, LINES, log_tail


def test_the_end_of_a_long_log(tmp_path: Path) -> None:
    """The last lines alone, long ones cut; the log's size and what is no text do not matter."""
    log = tmp_path / "engine.log"
    log.write_bytes(b"\xff" * 2**20 + b"\n" + b"\n".join(b"line %d" % number for number in range(100)) + b"\n" + b"x" * 5000)
    first, *lines = log_tail(log, {}).splitlines()
    assert first == f"See {log}; its last lines:"
    assert lines == [*(f"line {number}" for number in range(101 - LINES, 100)), "x" * LINE_LENGTH + "..."]


def test_secrets_are_not_quoted(tmp_path: Path) -> None:
    """Values of variables that are called secrets are shown by their names; those of others, and short ones, as they are."""
    log = tmp_path / "engine.log"
    log.write_text("token hf_abcdefgh and hf_abcdefgh2, key=sk-0123456789, user somebody, 12345\n")
    variables = {
        "HF_TOKEN": "hf_abcdefgh",
        "OTHER_TOKEN": "hf_abcdefgh2",
        "SOME_API_KEY": "sk-0123456789",
        "USER": "somebody",
        "A_TOKEN": "12345",
    }
    assert log_tail(log, variables).splitlines()[1:] == ["token $HF_TOKEN and $OTHER_TOKEN, key=$SOME_API_KEY, user somebody, 12345"]
