"""Which keys a query may see: windows[layer], 0 = all before it. None: no layer has a window."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fivefold.errors import UserError
from fivefold.model.huggingface.config_reader import ConfigReader


def read_windows(
    keys: ConfigReader,
    sliding: Sequence[bool] | None = None,
    *,
    required: bool = False,
    default_window: int | None = None,
    default_positions: int | None = None,
) -> tuple[int, ...] | None:
    """Windows of `sliding_window` in the layers that layer_types name, or else `sliding` (or all).

    A window that no sequence outgrows is none. The defaults are those of the class when the keys
    are absent; a null window is none, but where the family always has one (`required`).
    """
    num_layers = keys.count("num_hidden_layers")
    given = "sliding_window" in keys
    if not required and (keys.take("sliding_window") if given else default_window) is None:
        return windows_of_types(keys, num_layers, {"sliding_attention": 0})
    window = keys.count("sliding_window", default_window)
    windows = windows_of_types(keys, num_layers, {"sliding_attention": window})
    if keys.take("layer_types") is None:
        windows = tuple(window * each for each in sliding or (True,) * num_layers)
    if windows is None or not any(windows):
        return None
    if keys.take("max_position_embeddings") is None and default_positions is None:
        return windows
    positions = keys.count("max_position_embeddings", default_positions)
    if window >= positions:
        return None
    origin = "" if given else f" (what {keys.family} takes when the key is absent)"
    keys.untrainable.append(
        f"sliding_window {window}{origin} is shorter than max_position_embeddings {positions} "
        "and windowed attention is not implemented; set it to null if no sequence will have "
        f"more than {window} tokens"
    )
    return windows


def qwen_windows(keys: ConfigReader, slides: Callable[[int, int], bool]) -> tuple[int, ...] | None:
    """`slides`(layer, max_window_layers) is the class's rule where layer_types are absent."""
    num_layers = keys.count("num_hidden_layers")
    if not keys.flag("use_sliding_window", False):
        keys.pass_over("sliding_window")
        return windows_of_types(keys, num_layers, {"sliding_attention": 0})
    limit = keys.count("max_window_layers", 28, zero_allowed=True)
    sliding = [slides(layer, limit) for layer in range(num_layers)]
    return read_windows(keys, sliding, default_window=4096, default_positions=32768)


def llama4_chunks(keys: ConfigReader, num_layers: int) -> tuple[int, ...] | None:
    """Layers with rotary embedding attend within chunks; every fourth has neither."""
    interval = keys.count("no_rope_layer_interval", 4)
    no_rope = keys.take("no_rope_layers")  # 1 = rotary embedding, in spite of the name
    if "attention_chunk_size" in keys and keys.take("attention_chunk_size") is None:
        return windows_of_types(keys, num_layers, {"chunked_attention": 0})
    chunk = keys.count("attention_chunk_size")
    if keys.take("layer_types") is not None:
        return windows_of_types(keys, num_layers, {"chunked_attention": chunk})
    if not no_rope:
        return tuple(chunk * ((layer + 1) % interval > 0) for layer in range(num_layers))
    if not isinstance(no_rope, list) or len(no_rope) != num_layers or set(no_rope) - {0, 1}:
        raise UserError(f"no_rope_layers must be a list of {num_layers} numbers, each 0 or 1")
    return tuple(chunk * each for each in no_rope)


def windows_of_types(
    keys: ConfigReader, num_layers: int, kinds: dict[str, int]
) -> tuple[int, ...] | None:
    """What layer_types say, where they are there; `kinds`: the windows of the family's kinds."""
    layer_types = keys.take("layer_types")
    if layer_types is None:
        return None
    known = {"full_attention": 0, **kinds}
    if (
        not isinstance(layer_types, list)
        or len(layer_types) != num_layers
        or not all(isinstance(each, str) and each in known for each in layer_types)
    ):
        names = " or ".join(f'"{name}"' for name in known)
        raise UserError(f"layer_types must be {names} for each of the {num_layers} layers")
    windows = tuple(known[each] for each in layer_types)
    return windows if any(windows) else None
