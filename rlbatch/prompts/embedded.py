"""What the embedded run trains on: a tiny random Qwen3-MoE, its tokenizer, and a task that an exact check can score.

The task: given some symbols, answer with them, transformed symbol by symbol: ``a f c =`` -> ``a f c`` (copy). It cannot be won by a fixed
answer: a random answer is right at 1 of ``symbols`` positions on average, and the held-out prompts use every symbol about equally often at
every position, so a constant one is hardly better.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import string
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Transform = Callable[[int, int], int]
"""A rule of the task: (symbol, number of symbols) -> answer symbol."""

TRANSFORMS: Mapping[str, Transform] = {
    "copy": lambda symbol, count: symbol,
    "successor": lambda symbol, count: (symbol + 1) % count,
}


@dataclass(frozen=True)
class EmbeddedTask:
    """The choices that make the task.

    Attributes:
        symbols: Number of symbols, named a, b, c, ...; at most 26.
        length: Symbols of a prompt and of its answer.
        transform: What the answer does to each symbol, a key of ``TRANSFORMS``.
        train_prompts: Prompts in train.jsonl; the task has ``symbols ** length``.
        eval_prompts: Prompts in eval.jsonl, none of them in train.jsonl.
    """

    symbols: int = 10
    length: int = 3
    transform: str = "copy"
    train_prompts: int = 512
    eval_prompts: int = 128


TASK = EmbeddedTask()

# Only the end of the response is a special token: whatever else the policy appends shows in its text and costs reward.
EOS, UNK, EQUALS = "<eos>", "<unk>", "="

MODEL_CONFIG: Mapping[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "float32",
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that attention kernels of vLLM have on CPUs
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.0,
    "output_router_logits": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.03,
}


def write_embedded_task(folder: Path, seed: int) -> None:
    """Writes ``model/`` (config.json and tokenizer, no weights), ``train.jsonl`` and ``eval.jsonl``. Needs no torch. Files that are there
    are replaced; the same seed gives the same bytes.
    """
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    vocabulary = _vocabulary(TASK)
    special = {"pad_token_id": vocabulary[EOS], "bos_token_id": None, "eos_token_id": vocabulary[EOS]}
    _write_json(model / "config.json", {**MODEL_CONFIG, "vocab_size": len(vocabulary), **special})
    _write_tokenizer(model, vocabulary)
    train, held_out = _split(TASK, seed)
    _write_rows(folder / "train.jsonl", TASK, train)
    _write_rows(folder / "eval.jsonl", TASK, held_out)


def write_random_weights(model_folder: Path, seed: int) -> None:
    """Writes ``model.safetensors`` with fresh float32 weights, named as in a Hugging Face checkpoint; the caller's random state stays as it
    is.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder), dtype=torch.float32)
    # Through a folder of its own: save_pretrained would also rewrite config.json.
    with tempfile.TemporaryDirectory(dir=model_folder) as scratch:
        showed_progress = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        model.save_pretrained(scratch)
        if showed_progress:
            logging.enable_progress_bar()
        os.replace(Path(scratch) / "model.safetensors", model_folder / "model.safetensors")


def _symbols(task: EmbeddedTask) -> str:
    return string.ascii_lowercase[: task.symbols]


def _vocabulary(task: EmbeddedTask) -> dict[str, int]:
    return {token: index for index, token in enumerate((EOS, UNK, EQUALS, *_symbols(task)))}


def _write_tokenizer(folder: Path, vocabulary: Mapping[str, int]) -> None:
    """A word-level tokenizer: whitespace separates tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(dict(vocabulary), unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([EOS])
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    named = {"pad_token": EOS, "eos_token": EOS}
    _write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "model_max_length": 64, **named},
    )


def _split(task: EmbeddedTask, seed: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Disjoint (train, eval) prompts, all distinct."""
    pool = list(itertools.product(range(task.symbols), repeat=task.length))
    random.Random(f"embedded task {seed}").shuffle(pool)
    held_out = _balanced(task, pool)
    chosen = set(held_out)
    return [prompt for prompt in pool if prompt not in chosen][: task.train_prompts], held_out


def _balanced(task: EmbeddedTask, pool: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The first ``eval_prompts`` of the pool with no symbol too frequent at any position: it would make a good constant answer."""
    # One above the exact share: with no slack the last few prompts may not exist.
    limit = math.ceil(task.eval_prompts / task.symbols) + 1
    counts = [[0] * task.symbols for _ in range(task.length)]
    taken: list[tuple[int, ...]] = []
    for prompt in pool:
        if len(taken) < task.eval_prompts and all(counts[i][symbol] < limit for i, symbol in enumerate(prompt)):
            taken.append(prompt)
            for i, symbol in enumerate(prompt):
                counts[i][symbol] += 1
    return taken


def _write_rows(path: Path, task: EmbeddedTask, prompts: Iterable[tuple[int, ...]]) -> None:
    symbols, transform = _symbols(task), TRANSFORMS[task.transform]
    rows = []
    for prompt in prompts:
        text = " ".join([*(symbols[symbol] for symbol in prompt), EQUALS])
        rows.append({"prompt": text, "label": " ".join(symbols[transform(symbol, task.symbols)] for symbol in prompt)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
