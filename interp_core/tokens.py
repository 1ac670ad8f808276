"""Token input: everything that a user may pass as ``tokens``, checked and made into rows of ids.

The core takes padding off before a backend sees a prompt, and puts rows back into the caller's layout
afterwards (:mod:`interp_core.cache`); a backend pads as it likes. Left padding therefore never changes
a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from attrs import field, frozen

from interp_core.converters import as_tuple
from interp_core.errors import RequestError
from interp_core.facts import ModelFacts
from interp_core.scalars import whole_number

__all__ = ["UNKNOWN", "TokenBatch", "read_layers", "read_tokens", "select_positions"]

UNKNOWN: Final = 2**62
"""The length of a prompt that is not known yet: any position may be there."""


@frozen(kw_only=True)
class TokenBatch:
    """Prompts without padding, and where each stands in the caller's layout.

    Attributes:
        rows: token ids per prompt.
        offsets: column of each prompt's first token in the caller's layout.
        width: number of columns of the caller's layout.
        single: whether the caller gave one prompt rather than a batch.
    """

    rows: tuple[tuple[int, ...], ...] = field(converter=as_tuple)
    offsets: tuple[int, ...] = field(converter=as_tuple)
    width: int
    single: bool

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each prompt."""
        return tuple(len(row) for row in self.rows)


def read_tokens(tokens: Any, facts: ModelFacts, attention_mask: Any = None, *, room: int = 0) -> TokenBatch:
    """Check ``tokens`` and make rows of them.

    Args:
        tokens: ``[seq]`` or ``[batch, seq]`` tensor or array of ids, a list of ids, or a list of
            lists of unequal lengths.
        facts: the model's facts, for the vocabulary and the longest sequence.
        attention_mask: same shape as a ``[batch, seq]`` (or ``[seq]``) ``tokens``; 1 at real tokens,
            which must be one run per row (padding on either side).
        room: tokens that will be generated after each prompt.

    Raises:
        RequestError: no tokens, ids outside the vocabulary, not integers, or more tokens than the model takes.
    """
    rows, single = _rows(tokens)
    width = max((len(row) for row in rows), default=0)
    offsets = [0] * len(rows)
    if attention_mask is not None:
        rows, offsets = _unpad(rows, attention_mask)
    for i, row in enumerate(rows):
        _check_row(row, facts, room, "" if single else f"prompt {i}: ")
    return TokenBatch(rows=[tuple(row) for row in rows], offsets=offsets, width=width, single=single)


def select_positions(positions: Any, length: int) -> tuple[int, ...] | None:
    """Positions wanted of a prompt of ``length`` tokens; ``None`` for all of them.

    Args:
        positions: ``None``, ``"last"``, a slice, one position, or a list of positions from 0.
        length: number of tokens.

    Raises:
        RequestError: a position is not there, or is none of these forms.
    """
    if positions is None:
        return None
    if isinstance(positions, str):
        if positions != "last":
            raise RequestError(f"positions are 'last', a slice, or numbers from 0, not {positions!r}")
        return (length - 1,)
    if isinstance(positions, slice):
        if any(p is not None and whole_number(p) is None for p in (positions.start, positions.stop, positions.step)):
            raise RequestError(f"a slice of positions is made of whole numbers, not {positions!r}")
        return () if length == UNKNOWN else tuple(range(*positions.indices(length)))
    if hasattr(positions, "tolist"):
        positions = positions.tolist()
    if not isinstance(positions, Sequence):
        positions = [positions]
    return tuple(_position(p, length) for p in positions)


def read_layers(layers: Any, n_layers: int) -> list[int]:
    """Layers as a list of numbers; ``None`` for all, one number for one. Whether they exist is asked later.

    Raises:
        RequestError: it is none of these, or empty.
    """
    if layers is None:
        return list(range(n_layers))
    one = whole_number(layers)
    if one is not None:
        return [one]
    values = layers.tolist() if hasattr(layers, "tolist") else layers
    found = [whole_number(v) for v in values] if isinstance(values, (list, tuple, range, set, frozenset)) else [None]
    if not found or None in found:
        raise RequestError(f"layers are a list of numbers, at least one, not {layers!r}")
    return [number for number in found if number is not None]


def _position(value: Any, length: int) -> int:
    position = whole_number(value)
    if position is None:
        raise RequestError(f"positions are 'last', a slice, or numbers from 0, not {value!r}")
    if position < 0:
        raise RequestError(f"position {position} is not there: positions count from 0; 'last' is the last one")
    if position >= length:
        raise RequestError(f"position {position} is not there: this prompt has positions 0 to {length - 1}")
    return position


def _rows(tokens: Any) -> tuple[list[list[Any]], bool]:
    if isinstance(tokens, str) or (isinstance(tokens, (list, tuple)) and any(isinstance(t, str) for t in tokens)):
        raise RequestError("tokens are ids, not text: use model.to_tokens(text), or model.chat_tokens(messages)")
    if hasattr(tokens, "tolist") and hasattr(tokens, "ndim"):
        _check_array(tokens)
        values = tokens.tolist()
        return ([values], True) if tokens.ndim == 1 else (values, len(values) == 1)
    if not isinstance(tokens, (list, tuple, range)):
        raise RequestError(f"tokens are a tensor or a list of ids, not {type(tokens).__name__}")
    if not tokens:
        raise RequestError("there is nothing to run: tokens is empty")
    nested = [isinstance(t, (list, tuple, range)) or (hasattr(t, "ndim") and t.ndim == 1) for t in tokens]
    if not any(nested):
        return [list(tokens)], True
    if not all(nested):
        raise RequestError("tokens mixes ids and lists of ids; give a list of ids, or a list of lists")
    rows: list[Any] = list(tokens)
    return [list(row.tolist() if hasattr(row, "tolist") else row) for row in rows], False


def _check_array(tokens: Any) -> None:
    if tokens.ndim not in (1, 2):
        raise RequestError(f"tokens is [seq] or [batch, seq], not a tensor of shape {tuple(tokens.shape)}")
    kind = str(tokens.dtype)
    if "int" not in kind or "uint1" in kind:
        raise RequestError(f"token ids are integers, not {kind}")
    if 0 in tuple(tokens.shape):
        raise RequestError("there is nothing to run: tokens is empty")


def _unpad(rows: list[list[Any]], attention_mask: Any) -> tuple[list[list[Any]], list[int]]:
    masks = _mask_rows(attention_mask)
    if [len(m) for m in masks] != [len(r) for r in rows]:
        raise RequestError("attention_mask has not the shape of tokens")
    kept, offsets = [], []
    for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        real = [j for j, m in enumerate(mask) if m]
        if any(m not in (0, 1) for m in mask):
            raise RequestError(f"prompt {i}: attention_mask holds values other than 0 and 1")
        if not real:
            raise RequestError(f"prompt {i}: attention_mask leaves no token")
        if real[-1] - real[0] + 1 != len(real):
            raise RequestError(f"prompt {i}: attention_mask has a hole; padding is at the left or the right only")
        kept.append(row[real[0] : real[-1] + 1])
        offsets.append(real[0])
    return kept, offsets


def _mask_rows(attention_mask: Any) -> list[list[Any]]:
    values = attention_mask.tolist() if hasattr(attention_mask, "tolist") else attention_mask
    if not isinstance(values, (list, tuple)):
        raise RequestError(f"attention_mask is a tensor or lists of 0 and 1, not {type(attention_mask).__name__}")
    masks = [m.tolist() if hasattr(m, "tolist") else m for m in values]
    if not any(isinstance(m, (list, tuple)) for m in masks):
        masks = [masks]
    if not all(isinstance(m, (list, tuple)) for m in masks):
        raise RequestError("attention_mask has not the shape of tokens")
    return [list(m) for m in masks]


def _check_row(row: list[Any], facts: ModelFacts, room: int, where: str) -> None:
    if not row:
        raise RequestError(f"{where}there is nothing to run: the prompt is empty")
    for j, token in enumerate(row):
        number = whole_number(token)
        if number is None:
            raise RequestError(f"{where}token ids are integers, not {token!r}")
        row[j] = number
        if not 0 <= number < facts.vocab_size:
            raise RequestError(f"{where}token id {number} is outside the vocabulary (0 to {facts.vocab_size - 1})")
    limit = facts.max_positions
    if limit is not None and len(row) > limit:
        raise RequestError(f"{where}{len(row)} tokens are more than this model takes ({limit})")
    if limit is not None and len(row) + room > limit:
        raise RequestError(
            f"{where}{len(row)} tokens and max_tokens={room} are more than this model takes ({limit}); "
            + (f"max_tokens can be at most {limit - len(row)}" if len(row) < limit else "no room is left to generate")
        )
