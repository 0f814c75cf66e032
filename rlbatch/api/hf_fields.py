"""Reads a config.json so that no field that changes the arithmetic is passed over.

A family reads the fields that it implements, names the values of those that it implements in one form only, and names those without
effect. ``close`` then refuses what is left and could have one. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from rlbatch.api.errors import ModelError

MEANINGLESS = frozenset(
    # What the file is and how it is stored
    "architectures auto_map dtype id2label label2id model_type name_or_path num_labels problem_type tokenizer_class torch_dtype "
    "transformers_version vocab_file "
    # Special tokens
    "bos_token_id decoder_start_token_id eos_token_id pad_token_id "
    # Training; the balancing loss is not part of the policy's
    "gradient_checkpointing initializer_range router_aux_loss_coef "
    # By which kernels, and what is returned
    "attn_implementation cache_implementation experts_implementation output_attentions output_hidden_states output_router_logits "
    "return_dict tie_last_hidden_states use_cache use_flash_attention use_flash_attention_2 use_flash_attn "
    # Generation, as files of older versions have it
    "encoder_no_repeat_ngram_size encoder_repetition_penalty no_repeat_ngram_size num_beam_groups output_scores".split()
)
"""Fields of any config that say nothing about a token's logits."""

SUSPICIOUS = (
    "act attn attention bias block cap chunk clip compress dim drop embed encoder expert ffn gate group head heterogeneous index kv latent "
    "layer logit lora mlp moe mtp mult mup nextn norm per_ position qk quant rank resid rope rotary rout scal score shared sink size soft "
    "sparse tie topk vision audio window"
).split()
"""Parts of names: an unknown field that has one, and a value other than null, false, zero or empty, is refused."""

NEVER_EMPTY = ("quantization_config", "sliding_window")
"""Fields of any model in which only null means nothing: 0 and false are values too."""
MOST = {"layers": 1024, "experts": 8192}
"""Largest counts in fields whose names have these parts: more are a mistake, and loops go over each of them."""
MAX_COUNT = 2**31 - 1
"""Largest count in any other field."""

_FP8_BLOCK = [128, 128]


class HfFields:
    """A config.json, read field by field.

    Args:
        hf_config: The parsed file.
        family: Name of the family that reads it.

    Attributes:
        family: Name of the family that reads it.
    """

    def __init__(self, hf_config: Mapping[str, Any], family: str) -> None:
        self._config = hf_config
        self.family = family
        self._read: set[str] = set(MEANINGLESS)

    def value(self, name: str, default: Any = None) -> Any:
        """A field as it is; ``default`` if it is absent (not if it is null)."""
        self._read.add(name)
        return self._config.get(name, default)

    def size(self, *names: str, default: int | None = None, null: int | None = None, least: int = 1) -> int:
        """Reads a field that holds a count.

        Args:
            *names: The field, under any of its names.
            default: What transformers takes if it is absent; None: it must be there.
            null: What transformers takes if it is null; None: it fails, so null is refused.
            least: The smallest value that makes sense.

        Raises:
            ModelError: absent without a default, not an integer, below ``least``, more than any model has, or two names with different
                values.
        """
        given = {name: self.value(name) for name in names if name in self._config}
        self._read.update(names)
        if not given:
            if default is None:
                raise ModelError(f"config.json {names[0]}: is missing, and the {self.family} family needs it. Add it.")
            return default
        name, value = next(iter(given.items()))
        if len(given) > 1 and any(other != value or type(other) is not type(value) for other in given.values()):
            both = " and ".join(f"{key}={_shortened(content)}" for key, content in given.items())
            raise ModelError(f"config.json {both}: are two names of one number. Correct one.")
        if value is None and null is not None:
            return null
        most = next((limit for part, limit in MOST.items() if part in name), MAX_COUNT)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ModelError(f"config.json {name}={_shortened(value)}: must be an integer of at least {least}. Correct it.")
        if value > most:
            raise ModelError(f"config.json {name}={_shortened(value)}: must be at most {most}. Correct it.")
        return value

    def number(self, name: str, default: float) -> float:
        """A positive number; ``default`` if it is absent.

        Raises:
            ModelError: it is not one, or an integer, which transformers refuses.
        """
        value = self._positive(name, given := self.value(name, default))
        if not isinstance(given, float):
            raise ModelError(f"config.json {name}={given}: transformers takes no integer. Write {value}.")
        return value

    def flag(self, name: str, default: bool, null: bool | None = None) -> bool:
        """True or false.

        Args:
            name: The field.
            default: What transformers takes if it is absent.
            null: What transformers takes if it is null; None: it fails, so null is refused.

        Raises:
            ModelError: it is neither.
        """
        value = self.value(name, default)
        if value is None and null is not None:
            return null
        if not isinstance(value, bool):
            raise ModelError(f"config.json {name}={_shortened(value)}: must be true or false. Correct it.")
        return value

    def only(self, name: str, *values: Any) -> None:
        """A field that is implemented for some values only. Absent is one of them; null is a value like others, and types count.

        Raises:
            ModelError: another value.
        """
        given = self.value(name, values[0])
        if not any(given == value and type(given) is type(value) for value in values):
            implemented = " or ".join(repr(value) for value in values)
            shown = _shortened(given)
            raise ModelError(f"config.json {name}={shown}: the {self.family} family implements {implemented} only. Use another model.")

    def every(self, name: str, value: str) -> None:
        """A list, one item for each of num_hidden_layers, that is implemented for one value only; absent or null is that too.

        Raises:
            ModelError: another value, or another number of items.
        """
        given = self.value(name)
        if given is None:
            return
        if not isinstance(given, list) or any(item != value for item in given):
            shown = _shortened(given)
            raise ModelError(f"config.json {name}={shown}: the {self.family} family implements {value!r} only. Use another model.")
        if len(given) != (layers := self.size("num_hidden_layers")):
            raise ModelError(f"config.json {name}: has {len(given)} items, must have one for each of {layers} layers. Correct it.")

    def ignore(self, *names: str) -> None:
        """Fields that this family's arithmetic does not depend on."""
        self._read.update(names)

    def refuse(self, name: str, invariant: str, fix: str = "Correct it.") -> ModelError:
        """The error for a field that breaks ``invariant``, to be raised."""
        return ModelError(f"config.json {name}={_shortened(self.value(name))}: {invariant}. {fix}")

    def rope(self, default_theta: float, **kinds: Collection[str]) -> Mapping[str, Any]:
        """Rotary embeddings, of ``rope_parameters`` (written by transformers 5), or of ``rope_theta`` beside ``rope_scaling`` (before).

        Args:
            default_theta: What transformers takes if there is none.
            **kinds: The parameters that are implemented, by ``rope_type``; ``default`` always is.

        Returns:
            ``rope_type``, ``rope_theta``, and the parameters of that type that were given.

        Raises:
            ModelError: another type or parameter, or only a part of each head is rotated.
        """
        fields = {name: self.value(name) for name in ("rope_scaling", "rope_parameters")}
        for field, content in fields.items():
            if content is not None and not isinstance(content, Mapping):
                raise ModelError(f"config.json {field}={_shortened(content)}: must be an object. Correct it.")
        field = "rope_scaling" if fields["rope_scaling"] else "rope_parameters"
        given = dict(fields[field] or {})
        older = given.pop("type", "default")
        kind = given.pop("rope_type", older)
        if kind not in ("default", *kinds):
            implemented = " or ".join(repr(name) for name in ("default", *kinds))
            raise ModelError(
                f"config.json {field}.rope_type={kind!r}: the {self.family} family implements {implemented} only. Use another model."
            )
        # What stands inside counts, also if it is null.
        theta = given.pop("rope_theta", self.value("rope_theta", default_theta))
        outside = self.value("partial_rotary_factor")
        rotated = given.pop("partial_rotary_factor", 1.0 if outside is None else outside)
        if rotated != 1.0:
            raise ModelError(
                f"config.json partial_rotary_factor={rotated!r}: the {self.family} family implements 1.0 only. Use another model."
            )
        for name, value in given.items():
            if name not in kinds.get(kind, ()) and value is not None:
                raise ModelError(
                    f"config.json {field}.{name}={_shortened(value)}: the {self.family} family does not implement it for rope_type "
                    f"{kind!r}. Remove it, or use another model."
                )
        return {**given, "rope_type": kind, "rope_theta": self._positive(f"{field}.rope_theta", theta)}

    def block_fp8(self) -> None:
        """Accepts a checkpoint in bf16 or fp32, or one whose ``ModelFamily.fp8`` weights are e4m3 in blocks of 128 x 128.

        Raises:
            ModelError: another ``quantization_config``.
        """
        given = self.value("quantization_config")
        if given is None:
            return
        if not isinstance(given, Mapping):
            raise self.refuse("quantization_config", "must be an object")
        for name, value in {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": _FP8_BLOCK}.items():
            if given.get(name, value if name in ("fmt", "activation_scheme") else None) != value:
                raise ModelError(
                    f"config.json quantization_config.{name}={given.get(name)!r}: weights are read in fp32, bf16, or fp8 e4m3 in blocks of "
                    f"128 x 128 ({name} {value!r}). Use a checkpoint of one of these."
                )
        left_out = given.get("modules_to_not_convert")
        if left_out is not None and not (isinstance(left_out, list) and all(isinstance(name, str) for name in left_out)):
            shown = _shortened(left_out)
            raise ModelError(
                f"config.json quantization_config.modules_to_not_convert={shown}: must be a list of modules' names. Correct it."
            )

    def divides(self, part: str, size: int, whole: str, total: int) -> None:
        """Refuses a ``part`` (its ``size``) that does not divide ``whole`` (``total``).

        Raises:
            ModelError: it does not.
        """
        if total % size:
            raise ModelError(f"config.json {part}={size}: must divide {whole} ({total}). Correct it.")

    def even(self, name: str, size: int) -> None:
        """Refuses the size of a head that is rotated and is odd.

        Raises:
            ModelError: it is.
        """
        if size % 2:
            raise ModelError(f"config.json {name}={size}: must be even, rotary embeddings turn pairs. Use another model.")

    def close(self) -> None:
        """Refuses the fields that were neither read nor named and that could change the arithmetic.

        Raises:
            ModelError: the first such field.
        """
        self.only("is_causal", True)  # false, of models that embed texts, would pass for nothing
        if "layer_types" not in self._read:
            self.every("layer_types", "full_attention")
        for name, value in self._config.items():
            is_nothing = value is None if name in NEVER_EMPTY else not value
            if name in self._read or name.startswith("_") or is_nothing:
                continue
            if any(part in name.lower() for part in SUSPICIOUS):
                raise ModelError(
                    f"config.json {name}={_shortened(value)}: the {self.family} family does not know this field, and it may change the "
                    "arithmetic. Remove it if it does not, or use another model."
                )

    def _positive(self, name: str, value: Any) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise ModelError(f"config.json {name}={_shortened(value)}: must be a positive number. Correct it.")
        return float(value)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
