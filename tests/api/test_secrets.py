"""What is a secret, and texts without any."""

import pytest

from rlbatch.api.secrets import is_secret, without_secrets


def test_what_is_a_secret() -> None:
    """By its name, as an option or as a variable; tokens of a model and keys of a row are none."""
    secrets = ("api_key", "wandb_api_key", "token", "hf_token", "password", "client_secret", "WANDB_API_KEY", "HF_TOKEN", "GITHUB_TOKEN")
    others = ("stop_token", "label_key", "max_tokens", "prompt_key", "tokenizer", "key", "NCCL_DEBUG", "secretary", "pass_rate")
    assert [name for name in secrets if not is_secret(name)] == [name for name in others if is_secret(name)] == []


def test_texts_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of variables that are secrets, and passwords of addresses, are taken out of what a plugin said."""
    monkeypatch.setenv("SOME_API_KEY", "hunter22")
    said = without_secrets("401: hunter22 is no key of https://me:pw@host:80/x, nor of http://host:80/y@z")
    assert said == "401: *** is no key of https://***@host:80/x, nor of http://host:80/y@z"
