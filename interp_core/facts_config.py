"""Guarded reading of a configuration: which object describes the trunk, and what its keys say.

A configuration is only ever asked for attributes. Some raise on keys that differ per layer, some compute
them and fail, some spell the same thing in five ways; all of that ends here, as "not stated".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from attrs import field, frozen

from interp_core.errors import ModelUnavailable

__all__ = ["ConfigView", "Dimensions", "read_dimensions", "trunk_of"]

# Decoder keys first: where a configuration has both halves, the plain name often means the encoder's.
_N_LAYERS: Final = ("decoder_layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
_D_MODEL: Final = ("hidden_size", "d_model", "n_embd", "emb_dim", "dim", "embed_dim")
_VOCAB: Final = ("decoder_vocab_size", "vocab_size", "n_words", "n_token")

# Where wrappers that transformers itself does not know keep the language model's own configuration.
_TEXT_KEYS: Final = (
    "text_config",
    "llm_config",
    "language_config",
    "language_model_config",
    "lm_config",
    "thinker_config",
)


@frozen
class ConfigView:
    """A configuration behind a guard: what it does not state, or raises on, is ``None``.

    Attributes:
        config: the configuration.
    """

    config: Any = field(repr=False)

    def get(self, *names: str) -> Any:
        """The first stated value of ``names``; a dot leads into a nested configuration, mapping or list."""
        for name in names:
            value = self.config
            for part in name.split("."):
                value = _inner(value, part)
                if value is None:
                    break
            if value is not None:
                return value
        return None

    def integer(self, *names: str) -> int | None:
        """The first of ``names`` that holds an integer; ``True`` is not one."""
        return next((value for value in self._values(names) if _is_integer(value)), None)

    def number(self, *names: str) -> float | None:
        """The first of ``names`` that holds a number, as a float."""
        found = (value for value in self._values(names) if _is_integer(value) or isinstance(value, float))
        value = next(found, None)
        return None if value is None else float(value)

    def listed(self, *names: str) -> list[Any] | None:
        """The first of ``names`` that holds a list or tuple with anything in it."""
        found = (list(value) for value in self._values(names) if isinstance(value, (list, tuple)) and value)
        return next(found, None)

    def item(self, index: int, *names: str) -> int | None:
        """An integer for one layer: a scalar holds for all layers, a list has one entry per layer."""
        for value in self._values(names):
            own = value
            if isinstance(value, (list, tuple)):
                own = value[index] if index < len(value) else None
            if _is_integer(own):
                return int(own)
        return None

    def flag(self, *names: str) -> bool:
        """Whether any of ``names`` is true."""
        return any(bool(value) for value in self._values(names))

    def layer(self, index: int) -> ConfigView:
        """The view of one layer's own configuration, where layers differ; else this one."""
        if _guarded(self.config, "is_heterogeneous") is not True:
            return self
        try:
            own = self.config.per_layer_config[index]
        except Exception:  # noqa: BLE001 - whatever a configuration raises here, it states nothing for this layer.
            return self
        return ConfigView(own)

    def _values(self, names: tuple[str, ...]) -> Iterator[Any]:
        return (value for value in (self.get(name) for name in names) if value is not None)


@frozen(kw_only=True)
class Dimensions:
    """The three numbers without which a configuration describes no decoder."""

    n_layers: int
    d_model: int
    vocab_size: int


def trunk_of(config: Any) -> tuple[Any, str]:
    """The configuration that describes the text decoder, and the attribute path that leads to it.

    Raises:
        ModelUnavailable: the model is an encoder-decoder.
    """
    whole = ConfigView(config)
    name = _model_type(whole)
    if whole.get("is_encoder_decoder") is True:
        raise ModelUnavailable(f"{name!r} is an encoder-decoder; only decoders are served")
    trunk, path = _named_by_transformers(config)
    if not _complete(ConfigView(trunk)):
        trunk, path = _below(trunk, path)
    if ConfigView(trunk).get("is_encoder_decoder") is True:
        inner = _model_type(ConfigView(trunk))
        raise ModelUnavailable(f"{name!r} has an encoder-decoder, {inner!r}, for its text; only decoders are served")
    return trunk, path


def read_dimensions(view: ConfigView) -> Dimensions:
    """Layer count, width and vocabulary.

    Raises:
        ModelUnavailable: one of them is not stated, or is not a positive integer.
    """
    found: dict[str, int] = {}
    for what, name, keys in _REQUIRED:
        value = view.integer(*keys)
        if value is None:
            raise ModelUnavailable(
                f"{_model_type(view)!r} does not describe a decoder: it states no {what} (looked for {', '.join(keys)})"
            )
        if value < 1:
            raise ModelUnavailable(f"{_model_type(view)!r} states a {what} of {value}, so it describes no decoder")
        found[name] = value
    return Dimensions(**found)


_REQUIRED: Final = (
    ("number of layers", "n_layers", _N_LAYERS),
    ("hidden size", "d_model", _D_MODEL),
    ("vocabulary size", "vocab_size", _VOCAB),
)


def _guarded(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except Exception:  # noqa: BLE001 - not only AttributeError: per-layer keys and computed keys raise errors of their own.
        return None


def _inner(value: Any, part: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(part)
    if isinstance(value, (list, tuple)):
        return value[int(part)] if part.isdigit() and int(part) < len(value) else None
    return _guarded(value, part)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _model_type(view: ConfigView) -> str:
    return str(view.get("model_type") or type(view.config).__name__)


def _complete(view: ConfigView) -> bool:
    return all(view.integer(*keys) is not None for _, _, keys in _REQUIRED)


def _named_by_transformers(config: Any) -> tuple[Any, str]:
    method = _guarded(config, "get_text_config")
    if not callable(method):
        return config, ""
    try:
        trunk = method(decoder=True)
    except Exception:  # noqa: BLE001 - ambiguous wrappers raise; the names below are tried instead.
        return config, ""
    if trunk is None or trunk is config:
        return config, ""
    return trunk, _path_to(config, trunk)


def _path_to(config: Any, trunk: Any, depth: int = 2) -> str:
    """Dotted attribute path from ``config`` to the very object ``trunk``; empty if it is a copy."""
    for name in _sub_names(config):
        value = _guarded(config, name)
        if value is trunk:
            return name
        if value is not None and depth > 1:
            rest = _path_to(value, trunk, depth - 1)
            if rest:
                return f"{name}.{rest}"
    return ""


def _sub_names(config: Any) -> tuple[str, ...]:
    declared = _guarded(config, "sub_configs")
    own = tuple(declared) if isinstance(declared, Mapping) else ()
    return tuple(dict.fromkeys((*own, *_TEXT_KEYS)))


def _below(config: Any, path: str) -> tuple[Any, str]:
    """The first complete text configuration below ``config``, or ``config`` itself."""
    for name in _TEXT_KEYS:
        value = _guarded(config, name)
        if value is None or isinstance(value, (str, int, float, Mapping)):
            continue
        here = f"{path}.{name}" if path else name
        if _complete(ConfigView(value)):
            return value, here
        deeper, deeper_path = _below(value, here)
        if deeper is not value:
            return deeper, deeper_path
    return config, path
