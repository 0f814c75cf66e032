"""What a run reads of a model's folder beside config.json and weights: the tokenizer's files, and at which tokens a response ends.

Submit reads them here, without transformers, so that what ranks would fail at is told before they start. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbatch.api import DataError
from rlbatch.checkpoint.model_files import TEMPLATES
from rlbatch.config.bounded_files import LARGE_BYTES, MissingFileError, read_json, read_text
from rlbatch.config.hf_config import read_config
from rlbatch.prompts.resource_limits import bounded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION, TOKENIZER, TOKENIZER_CONFIG = "generation_config.json", "tokenizer.json", "tokenizer_config.json"
OTHER_JSON = ("special_tokens_map.json", "added_tokens.json", "vocab.json", "chat_template.json")
TEXTS = ("chat_template.jinja", "merges.txt", "vocab.txt")
ORIGINALS = (
    *("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "tiktoken.model", "qwen.tiktoken"),
    *("sentencepiece.bpe.model", "spiece.model"),
)
"""Files of which transformers can make a tokenizer, from any one of them, with packages that rlbatch does not require."""
PLAIN_CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend")
"""Tokenizer classes without special tokens of their own."""
_FIX = "Correct it, or download it again."


def check_model_folder(folder: Path, hf_config: Mapping[str, Any], vocab_size: int) -> None:
    """Refuses, with DataError, a folder whose tokenizer cannot be read, or with which no response could end."""
    for name in OTHER_JSON:
        _optional(folder / name)
    for path in (*(folder / name for name in TEXTS), *sorted((folder / TEMPLATES).glob("*.jinja"))):
        if path.exists():
            read_text(path, _FIX, LARGE_BYTES)
    described, content = _optional(folder / TOKENIZER_CONFIG), _optional(folder / TOKENIZER)
    if not content and not any((folder / name).exists() for name in ORIGINALS):
        raise DataError(f"{folder / TOKENIZER}: not there. Download the model's tokenizer: {TOKENIZER} and {TOKENIZER_CONFIG}.")
    _check_templates(folder / TOKENIZER_CONFIG, described.get("chat_template"))
    special = _optional(folder / "special_tokens_map.json")
    token = described.get("eos_token") if described.get("eos_token") is not None else special.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    number = _number(content, text) if isinstance(text, str) else None
    if number is not None or (content and isinstance(text, str)) or described.get("tokenizer_class") in PLAIN_CLASSES:
        end_tokens(folder, hf_config, vocab_size, number)
    else:  # the tokenizer's class may have one of its own
        _listed(folder, hf_config, vocab_size, number)


def load_tokenizer(folder: Path, name: Path) -> PreTrainedTokenizerBase:
    """The tokenizer, as transformers reads it from ``folder``, the model's or what engines read of it; DataError, if it cannot, names
    ``name``.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever it raises, of whatever package
        said = next(iter(str(error).splitlines()), "")
        raise DataError(
            f"{name}: transformers cannot load the tokenizer ({type(error).__name__}: {said}). "
            f"Download {TOKENIZER} and {TOKENIZER_CONFIG} again."
        ) from error
    tokenizer.name_or_path = str(name)
    return tokenizer


def end_tokens(folder: Path, hf_config: Mapping[str, Any], vocab_size: int, of_tokenizer: int | None) -> tuple[int, ...]:
    """The tokens that end a response: those of generation_config.json, of config.json and of the tokenizer.

    Raises:
        DataError: one that is no token of the model, or none at all.
    """
    ends = _listed(folder, hf_config, vocab_size, of_tokenizer)
    if not ends:
        raise DataError(
            f"{folder}: no end token: neither {GENERATION}, config.json (eos_token_id) nor {TOKENIZER_CONFIG} (eos_token) names one that "
            f"the tokenizer has, so that no response would stop before rollout.max_response_tokens. Name it in {GENERATION}."
        )
    return tuple(sorted(ends))


def unseen_end(tokenizer: PreTrainedTokenizerBase, folder: Path, vocab_size: int) -> str | None:
    """A warning if the chat template ends an answer with a special token at which no response stops; None: it does not, or nobody knows."""
    answer = "an answer"
    messages = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}]
    try:
        with bounded(seconds=5.0, more_bytes=2**31):
            text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # it takes no such messages
        return None
    _, found, behind = text.rpartition(answer)
    special = [token for token in tokenizer(behind, add_special_tokens=False)["input_ids"] if token in tokenizer.added_tokens_decoder]
    ends = end_tokens(folder, read_config(folder), vocab_size, tokenizer.eos_token_id)
    if not found or not special or set(special) & set(ends):
        return None
    return (
        f"Warning: {folder}: its chat template ends an answer with {tokenizer.decode(special[:1])} ({special[0]}), and no response stops "
        f"there: the end tokens are {', '.join(map(str, ends))}. If the model writes it, add {special[0]} to eos_token_id in {GENERATION}."
    )


def _listed(folder: Path, hf_config: Mapping[str, Any], vocab_size: int, of_tokenizer: int | None) -> set[int]:
    named = {
        f"{folder / GENERATION}: eos_token_id": _optional(folder / GENERATION).get("eos_token_id"),
        f"{folder / 'config.json'}: eos_token_id": hf_config.get("eos_token_id"),
        f"{folder}: the tokenizer's eos_token": of_tokenizer,
    }
    ends: set[int] = set()
    for where, value in named.items():
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise DataError(
                    f"{where} is {str(token)[:40]}: must be a token that the model can sample, from 0 to {vocab_size - 1}. Correct it."
                )
            ends.add(token)
    return ends


def _optional(path: Path) -> dict[str, Any]:
    try:
        return read_json(path, _FIX, LARGE_BYTES)
    except MissingFileError:
        return {}


def _check_templates(path: Path, template: Any) -> None:
    named = template if isinstance(template, list) else []
    are_named = all(isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("template"), str) for one in named)
    if not (template is None or isinstance(template, (str, list))) or not are_named:
        raise DataError(f'{path}: chat_template must be a text, or a list of {{"name": text, "template": text}}. Correct it.')


def _number(content: Mapping[str, Any], text: str) -> int | None:
    """A token's number in tokenizer.json; None: it is not in it."""
    model = content.get("model")
    words = model.get("vocab") if isinstance(model, dict) else None
    added = content.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and token.get("content") == text and isinstance(token.get("id"), int):
            return int(token["id"])
    if isinstance(words, list):  # Unigram: pieces with their scores
        words = {piece[0]: number for number, piece in enumerate(words) if isinstance(piece, list) and piece and isinstance(piece[0], str)}
    number = words.get(text) if isinstance(words, dict) else None
    return number if isinstance(number, int) else None
