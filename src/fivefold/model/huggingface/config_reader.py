"""The keys of a config.json: each read with its type, and all of them accounted for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from fivefold.errors import UserError

# fmt: off
HARMLESS = frozenset({
    # Where the file comes from and how it is stored.
    "_commit_hash", "_name_or_path", "architectures", "auto_map", "ep_size", "model_type",
    "transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version",
    # Data types and kernels: the run chooses its own.
    "_attn_implementation", "attn_implementation", "chunk_size_feed_forward", "dtype",
    "pretraining_tp", "torch_dtype", "torchscript", "use_bfloat16",
    # The tokenizer.
    "begin_suppress_tokens", "bos_token_id", "decoder_start_token_id", "eos_token_id",
    "pad_token_id", "prefix", "sep_token_id", "suppress_tokens", "tokenizer_class",
    "unk_token_id",
    # Generation.
    "bad_words_ids", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_eos_token_id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "remove_invalid_values",
    "repetition_penalty", "temperature", "top_k", "top_p", "typical_p", "use_cache",
    # What a forward pass returns. Balance losses are always computed in training.
    "output_attentions", "output_hidden_states", "output_router_logits", "output_scores",
    "return_dict", "return_dict_in_generate",
    # Other tasks' heads.
    "finetuning_task", "id2label", "label2id", "problem_type", "task_specific_params",
    # Initial weights and the longest sequence are choices of the run.
    "initializer_range", "max_position_embeddings", "max_sequence_length",
    # Flags of no effect here: no encoder is tied, no window is ever used (see config.py).
    "is_decoder", "is_llama_config", "max_window_layers", "tie_encoder_decoder",
})
# fmt: on
"""Keys that change nothing in the mathematics of one training step."""

COUNTED: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "is_encoder_decoder": (False,),
    "mlp_bias": (False,),
    "pruned_heads": ({},),
    "use_sliding_window": (False,),
}
"""Keys that change the weights or what attention sees, with the values that are read. It holds
for the families whose reader does not read the key itself, as does the next table."""

TRAINED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "norm_topk_prob": (True,),
    "partial_rotary_factor": (1,),
    "quantization_config": (),
    "rope_interleaved": (False,),
    "router_jitter_noise": (0,),
    "use_mrope": (False,),
}
"""Keys that change the mathematics but no size, with the values that can be trained."""

LARGEST_COUNT = 10_000_000
LARGEST_LAYERS = 10_000
"""No width, number of rows, heads or experts, and no number of layers, is beyond these: a slip of
the keyboard must not become arithmetic that overflows."""


def refuse_absurd(name: str, count: int) -> None:
    """UserError for a width or count of a model that is beyond sense."""
    most = LARGEST_LAYERS if "layer" in name or name == "mtp" else LARGEST_COUNT
    if count > most:
        raise UserError(f"{name} {count:,} is too large: the most is {most:,}")


class ConfigReader:
    """One JSON object of a config.json.

    A reader takes the keys it knows, each with its type; `refuse_unread` then accounts for the
    rest, so that no key that could change the mathematics is passed over in silence. A null
    counts as an absent key, as in the Hugging Face classes.
    """

    def __init__(self, values: Mapping[str, Any], family: str, prefix: str = "") -> None:
        """`prefix` is how messages name a nested object ("rope_scaling.")."""
        self.family = family
        self._values = values
        self._prefix = prefix
        self._unread = set(values)
        self.untrainable: list[str] = []  # reasons, in words, why the model cannot be trained

    def __contains__(self, name: str) -> bool:
        """Is the key there, if only as null?"""
        return name in self._values

    def take(self, name: str) -> Any:
        """The value as it stands, None when absent."""
        self._unread.discard(name)
        return self._values.get(name)

    def pass_over(self, *names: str) -> None:
        """Account for keys that change neither sizes nor, in this family, what is counted."""
        self._unread.difference_update(names)

    def count(self, name: str, default: int | None = None, *, zero_allowed: bool = False) -> int:
        """A width or count, at least 1 (or 0 with `zero_allowed`).

        Absent and without a default, it is an error.
        """
        value = self._take_or(name, default)
        if type(value) is not int or value < (0 if zero_allowed else 1):
            kind = "an integer of at least 0" if zero_allowed else "a positive integer"
            raise self._wrong(name, value, kind)
        refuse_absurd(self._named(name), value)
        return value

    def number(
        self, name: str, default: float | None = None, *, zero_allowed: bool = False
    ) -> float:
        """A finite number above 0 (or at least 0 with `zero_allowed`)."""
        value = self._take_or(name, default)
        kind = "a number of at least 0" if zero_allowed else "a positive number"
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise self._wrong(name, value, kind)
        if value == 0 and not zero_allowed:
            raise self._wrong(name, value, kind)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._take_or(name, default)
        if type(value) is not bool:
            raise self._wrong(name, value, "true or false")
        return value

    def layer_set(self, name: str, num_layers: int) -> frozenset[int]:
        """A list of layer indices (0-based); absent, it is empty."""
        value = self._take_or(name, [])
        if type(value) is not list or any(
            type(layer) is not int or not 0 <= layer < num_layers for layer in value
        ):
            raise self._wrong(name, value, f"a list of layers from 0 to {num_layers - 1}")
        return frozenset(value)

    def inside(self, name: str) -> ConfigReader:
        """The keys of a nested object; absent, it is empty."""
        value = self._take_or(name, {})
        if not isinstance(value, Mapping):
            raise self._wrong(name, value, "an object of keys and values")
        nested = ConfigReader(value, self.family, f"{self._prefix}{name}.")
        nested.untrainable = self.untrainable
        return nested

    def refuse_unread(self) -> None:
        """Raise UserError for the first key left that could change the model's sizes.

        A key that only the trainer would have to know is noted in `untrainable`.
        """
        for name in sorted(self._unread - HARMLESS):
            value = self._values[name]
            if value is None:
                continue
            if name in TRAINED:
                if value not in TRAINED[name]:
                    self.untrainable.append(f"{self._is(name, value)} is not implemented")
            elif name not in COUNTED:
                raise UserError(
                    f"{self._is(name, value)} is not a known key of model_type {self.family} and "
                    "might change the model; remove it if it does not"
                )
            elif value not in COUNTED[name]:
                allowed = " or ".join(_shown(each) for each in COUNTED[name])
                raise UserError(
                    f"{self._is(name, value)} is not implemented for model_type {self.family}; it "
                    f"can be {allowed}"
                )

    def _take_or(self, name: str, default: Any) -> Any:
        value = self.take(name)
        if value is None and default is None:
            raise UserError(
                f"the config of this {self.family} model has no {self._named(name)}, and that is "
                "never guessed; add it"
            )
        return default if value is None else value

    def _is(self, name: str, value: Any) -> str:
        return f"{self._named(name)} = {_shown(value)}"

    def _named(self, name: str) -> str:
        return self._prefix + (name if name.isprintable() else _shown(name))

    def _wrong(self, name: str, value: Any, kind: str) -> UserError:
        return UserError(f"{self._named(name)} must be {kind}, not {_shown(value)}")


def _shown(value: Any) -> str:
    """A value as it stands in the JSON file, cut to what fits in a sentence."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."
