"""Text from tokens, as they come: byte-correct, in context of the prompt, with stop strings.

Decoding tokens one by one loses characters whose bytes are spread over tokens. A :class:`TextStream`
decodes all that there is and gives out only what can no longer change, so that the pieces join to
exactly the text of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from attrs import define, field

__all__ = ["TextStream"]

_CONTEXT: Final = 8
"""Prompt tokens that are decoded in front, so that the first new word keeps its leading space."""

_INCOMPLETE: Final = "\ufffd"


@define(eq=False)
class TextStream:
    """Turns token ids into pieces of text.

    Attributes:
        tokenizer: a transformers tokenizer.
        prompt: ids of the prompt.
        stop: strings that end the text; the text ends before the first of them.
        ids: new ids so far.
        stopped: whether a stop string was found.
    """

    tokenizer: Any
    prompt: Sequence[int] = ()
    stop: tuple[str, ...] = ()
    ids: list[int] = field(factory=list)
    stopped: bool = False
    _context: list[int] = field(init=False)
    _prefix: str = field(init=False)
    _given: str = field(default="", init=False)

    def __attrs_post_init__(self) -> None:
        self._context = list(self.prompt[-_CONTEXT:])
        self._prefix = self._decode(self._context)
        # A prompt that ends inside a character would make that character's rest unprintable: start afresh.
        if self._prefix.endswith(_INCOMPLETE):
            self._context, self._prefix = [], ""

    @property
    def text(self) -> str:
        """All text given out so far."""
        return self._given

    def push(self, token_id: int) -> str:
        """Take one new id; return the text that is now certain (maybe empty)."""
        if self.stopped:
            return ""
        self.ids.append(token_id)
        return self._give(self._whole(), final=False)

    def finish(self) -> str:
        """Return what was held back; call once, after the last id."""
        return "" if self.stopped else self._give(self._whole(), final=True)

    def _whole(self) -> str:
        text = self._decode([*self._context, *self.ids])
        if not text.startswith(self._prefix):
            return self._decode(self.ids)
        return text[len(self._prefix) :]

    def _give(self, whole: str, *, final: bool) -> str:
        cut = self._first_stop(whole)
        if cut is not None:
            self.stopped = True
            certain = whole[:cut]
        elif final:
            certain = whole
        else:
            certain = whole[: self._certain_length(whole)]
        piece = certain[len(self._given) :]
        self._given += piece
        return piece

    def _first_stop(self, whole: str) -> int | None:
        found = [at for s in self.stop if (at := whole.find(s)) >= 0]
        return min(found) if found else None

    def _certain_length(self, whole: str) -> int:
        # An unfinished character shows as one or more replacement characters at the end.
        # A stop string that has begun ends before it: that character may be the stop string's next.
        complete = whole.rstrip(_INCOMPLETE)
        held = max((_begun(complete, s) for s in self.stop), default=0)
        return max(len(complete) - held, len(self._given))

    def _decode(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``stop``."""
    return next((n for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n])), 0)
