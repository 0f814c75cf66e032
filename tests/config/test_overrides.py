"""The command line: text arrives as it was typed."""

from __future__ import annotations

import pytest

from rlbatch.config.compose import compose

AS_TYPED = [
    *("true", "False", "on", "off", "yes", "no", "null", "~", "0.10", "1e3", "2.10", "007", "0o17", "0x1F", "1_000", ".5", "inf", "nan"),
    *("2026-01-01", "12:30:00", "", "a,b", "a=b", "mlx5_0:1,mlx5_1:1", "^lo,docker", "a b  c", "x;y|z&", "(a)", "str(5)", "choice(a,b)"),
    *("-Dx=$HOME", 'a"b', "\\d", "é", "9" * 5000, "[a|b]&c"),
]
"""Without quotes of Hydra's or backslashes before its own characters."""


def test_variables_have_the_text_that_was_typed() -> None:
    """Programs compare with `1` or `true`: what Hydra or YAML would make of the value does not matter."""
    typed = {f"A{number}": text for number, text in enumerate(AS_TYPED)}
    assert compose([f"cluster.environment.{name}={text}" for name, text in typed.items()]).cluster.environment == typed


def test_quotes_and_interpolation_are_hydras(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quotes around it, a backslash before a comma and `${...}` have Hydra's meaning."""
    monkeypatch.setenv("RLBATCH_TRY", "5e1")
    typed = ['A="q  x"', "B='q'", 'C="null"', r'D="a\"b"', r"E=a\,b", "F= x ", "G=${oc.env:RLBATCH_TRY}"]
    found = compose([f"cluster.environment.{text}" for text in typed]).cluster.environment
    assert found == {"A": "q  x", "B": "q", "C": "null", "D": 'a"b', "E": "a,b", "F": "x", "G": "5e1"}


def test_mappings_and_lists_of_text() -> None:
    """Also where several are given at once, and in an engine's variables."""
    config = compose(
        [
            'cluster.environment={A: true, B: 0.10, C: on, D: "x, 1]", E: 007, F:1e3}',
            "rollout.engine.environment={A: true, B: 1e3}",
            "rollout.engine.environment.C=off",
            "plugins=[007,1e3,true]",
            "cluster.sbatch_options=[--comment=1e3, --begin=12:30:00]",
        ]
    )
    assert config.cluster.environment == {"A": "true", "B": "0.10", "C": "on", "D": "x, 1]", "E": "007", "F": "1e3"}
    assert config.rollout.engine == {"environment": {"A": "true", "B": "1e3", "C": "off"}}
    assert config.plugins == ("007", "1e3", "true")
    assert config.cluster.sbatch_options == ("--comment=1e3", "--begin=12:30:00")


@pytest.mark.parametrize("text", ["007", "1e3", "on", "true", "12:30:00", "2026-01-01", "a,b"])
def test_texts_stay_texts(text: str) -> None:
    """A partition 007, an account 1e3, a reward named on and a list of partitions are no numbers, truth values or sweeps."""
    keys = ("cluster.partition", "cluster.account", "cluster.constraint", "cluster.time_limit", "model.name", "data.label_key")
    config = compose([*(f"{key}={text}" for key in keys), f"reward={text}", f"offload.name={text}"])
    assert {getattr(getattr(config, key.partition(".")[0]), key.partition(".")[2]) for key in keys} == {text}
    assert (config.reward.name, config.offload.name) == (text, text)
