"""Reading a config.json so that no field that changes the arithmetic is passed over.

A family reads the fields that it implements, names the values of those that it implements in one form only, and names those without
effect. ``close`` then refuses what is left and could have one. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from rlbatch.api.errors import ModelError

MEANINGLESS = frozenset(
    "architectures auto_map bos_token_id cache_implementation decoder_start_token_id dtype eos_token_id id2label initializer_range "
    "label2id model_type name_or_path num_labels output_attentions output_hidden_states output_router_logits pad_token_id problem_type "
    "return_dict router_aux_loss_coef tie_last_hidden_states tokenizer_class torch_dtype transformers_version use_cache vocab_file".split()
)
"""Fields of any config that say nothing about a token's logits; the balancing loss is not part of the policy's."""

SUSPICIOUS = (
    "act attn attention bias block cap chunk clip compress dim drop embed encoder expert ffn gate group head heterogeneous index kv latent "
    "layer logit lora mlp moe mtp mult mup nextn norm per_ position qk quant rank resid rope rotary rout scal score shared sink size soft "
    "sparse tie topk vision audio window"
).split()
"""Parts of names: an unknown field that has one, and a value other than null, false, zero or empty, is refused."""

_FP8_BLOCK = [128, 128]


class HfFields:
    """A config.json, read field by field.

    Args:
        hf_config: The parsed file.
        family: Name of the family that reads it.

    Attributes:
        family: As given.
    """

    def __init__(self, hf_config: Mapping[str, Any], family: str) -> None:
        self._config = hf_config
        self.family = family
        self._read: set[str] = set(MEANINGLESS)

    def value(self, name: str, default: Any = None) -> Any:
        """A field as it is; ``default`` if it is absent (not if it is null)."""
        self._read.add(name)
        return self._config.get(name, default)

    def size(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """A count.

        Args:
            *names: The field, under any of its names.
            default: What transformers takes if it is absent or null; None: it must be there.
            least: The smallest value that makes sense.

        Raises:
            ModelError: absent without a default, not an integer, below ``least``, or two names with different values.
        """
        given = {name: self.value(name) for name in names}
        present = {name: value for name, value in given.items() if value is not None}
        if not present:
            if default is None:
                raise ModelError(f"config.json {names[0]}: is missing, and the {self.family} family needs it. Add it.")
            return default
        name, value = next(iter(present.items()))
        if any(other != value for other in present.values()):
            both = " and ".join(f"{key}={content!r}" for key, content in present.items())
            raise ModelError(f"config.json {both}: are two names of one number. Correct one.")
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ModelError(f"config.json {name}={value!r}: must be an integer of at least {least}. Correct it.")
        return value

    def number(self, name: str, default: float) -> float:
        """A positive number.

        Raises:
            ModelError: it is not one.
        """
        value = self.value(name)
        return default if value is None else self._positive(name, value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false.

        Raises:
            ModelError: it is neither.
        """
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"config.json {name}={value!r}: must be true or false. Correct it.")
        return value

    def only(self, name: str, *values: Any) -> None:
        """A field that is implemented for some values only; absent or null is one of them.

        Raises:
            ModelError: another value.
        """
        given = self.value(name)
        if given is not None and given not in values:
            implemented = " or ".join(repr(value) for value in values)
            raise ModelError(f"config.json {name}={given!r}: the {self.family} family implements {implemented} only. Use another model.")

    def every(self, name: str, value: str) -> None:
        """A list, one item a layer, that is implemented for one value only; absent or null is that too.

        Raises:
            ModelError: another value.
        """
        given = self.value(name)
        if given is not None and (not isinstance(given, list) or any(item != value for item in given)):
            shown = _shortened(given)
            raise ModelError(f"config.json {name}={shown}: the {self.family} family implements {value!r} only. Use another model.")

    def ignore(self, *names: str) -> None:
        """Fields that this family's arithmetic does not depend on."""
        self._read.update(names)

    def refuse(self, name: str, invariant: str, fix: str = "Correct it.") -> ModelError:
        """The error for a field that breaks ``invariant``, to be raised."""
        return ModelError(f"config.json {name}={self.value(name)!r}: {invariant}. {fix}")

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
        scaling, parameters = self.value("rope_scaling"), self.value("rope_parameters")
        field = "rope_scaling" if scaling else "rope_parameters"
        content = scaling or parameters or {}
        if not isinstance(content, Mapping):
            raise ModelError(f"config.json {field}={content!r}: must be an object. Correct it.")
        given = dict(content)
        names = [given.pop(name, None) for name in ("rope_type", "type")]
        kind = names[0] or names[1] or "default"
        if kind not in ("default", *kinds):
            implemented = " or ".join(repr(name) for name in ("default", *kinds))
            raise ModelError(
                f"config.json {field}.rope_type={kind!r}: the {self.family} family implements {implemented} only. Use another model."
            )
        outside = {name: self.value(name) for name in ("rope_theta", "partial_rotary_factor")}
        theta = given.pop("rope_theta", None) or outside["rope_theta"] or default_theta
        rotated = given.pop("partial_rotary_factor", None) or outside["partial_rotary_factor"] or 1.0
        if rotated != 1.0:
            raise ModelError(
                f"config.json partial_rotary_factor={rotated!r}: the {self.family} family implements 1.0 only. Use another model."
            )
        for name, value in given.items():
            if name not in kinds.get(kind, ()) and value is not None:
                raise ModelError(
                    f"config.json {field}.{name}={value!r}: the {self.family} family does not implement it for rope_type {kind!r}. "
                    "Remove it, or use another model."
                )
        return {**given, "rope_type": kind, "rope_theta": self._positive(f"{field}.rope_theta", theta)}

    def block_fp8(self) -> None:
        """Accepts a checkpoint in bf16 or fp32, or one whose ``ModelFamily.fp8`` weights are e4m3 in blocks of 128 x 128.

        Raises:
            ModelError: another ``quantization_config``.
        """
        given = self.value("quantization_config")
        if not given:
            return
        if not isinstance(given, Mapping):
            raise self.refuse("quantization_config", "must be an object")
        for name, value in {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": _FP8_BLOCK}.items():
            if given.get(name, value if name in ("fmt", "activation_scheme") else None) != value:
                raise ModelError(
                    f"config.json quantization_config.{name}={given.get(name)!r}: weights are read in fp32, bf16, or fp8 e4m3 in blocks of "
                    f"128 x 128 ({name} {value!r}). Use a checkpoint of one of these."
                )

    def divides(self, part: str, size: int, whole: str, total: int) -> None:
        """Refuses a ``part`` (its ``size``) that does not divide ``whole`` (``total``).

        Raises:
            ModelError: it does not.
        """
        if total % size:
            raise ModelError(f"config.json {part}={size}: must divide {whole} ({total}). Correct it.")

    def close(self) -> None:
        """Refuses the fields that were neither read nor named and that could change the arithmetic.

        Raises:
            ModelError: the first such field.
        """
        self.only("is_causal", True)  # false, of models that embed texts, would pass for nothing
        for name, value in self._config.items():
            if name in self._read or name.startswith("_") or not value:
                continue
            if any(part in name.lower() for part in SUSPICIOUS):
                raise ModelError(
                    f"config.json {name}={_shortened(value)}: the {self.family} family does not know this field, and it may change the "
                    "arithmetic. Remove it if it does not, or use another model."
                )

    def _positive(self, name: str, value: Any) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise ModelError(f"config.json {name}={value!r}: must be a positive number. Correct it.")
        return float(value)


def _shortened(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."
