"""Which tokens of a conversation belong to which message: contiguous spans that together cover every token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from interp_core.converters import as_tuple
from interp_core.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ChatTokens", "MessageSpan", "chat_spans"]

_MARK: Final = "\u2063mark\u2063"
"""Invisible separators, which no conversation is likely to hold, around a word."""

Render = Callable[[Sequence[Mapping[str, Any]], bool], str]
"""Messages, and whether the opening of the next answer is wanted, to text."""


@frozen(kw_only=True)
class MessageSpan:
    """The tokens of one message, its header and end included.

    Attributes:
        message: the message's number; ``None`` for the opening of the next answer.
        role: its role.
        start, end: first token, and the one behind the last.
    """

    message: int | None
    role: str
    start: int
    end: int


@frozen(kw_only=True, eq=False)
class ChatTokens:
    """A conversation as tokens.

    Attributes:
        tokens: ids ``[1, seq]``, the same as ``chat_tokens`` gives.
        spans: one per message, in order, and one for the opening of the next answer where there is one. They follow
            each other from the first token to the last; what the format writes before the first message (such as a
            system prompt of its own) is the first message's.
    """

    tokens: Tensor = field(repr=False)
    spans: tuple[MessageSpan, ...] = field(converter=as_tuple)

    def positions(self, message: int) -> list[int]:
        """Positions of one message; negative numbers count from the last.

        Raises:
            RequestError: there is no such message.
        """
        of = [span for span in self.spans if span.message is not None]
        if not -len(of) <= message < len(of):
            raise RequestError(f"there are {len(of)} messages, and no number {message}")
        return list(range(of[message].start, of[message].end))


def chat_spans(tokenizer: Any, messages: Sequence[Any], render: Render, *, add_generation_prompt: bool) -> ChatTokens:
    """Tokens of a conversation, and which message each is of.

    Args:
        tokenizer: a transformers tokenizer that knows where in a text its tokens are.
        messages: the conversation.
        render: the checkpoint's format.
        add_generation_prompt: whether the text ends with the opening of the next answer.

    Raises:
        RequestError: there is no message, or the tokenizer does not know where its tokens are.
    """
    import torch

    if not messages:
        raise RequestError("a conversation without messages has no spans")
    text = render(messages, add_generation_prompt)
    if not getattr(tokenizer, "is_fast", False):
        raise RequestError("this checkpoint's tokenizer does not say where in a text its tokens are")
    coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ends = _message_ends(messages, render, text, add_generation_prompt)
    roles = [str(message.get("role", "")) for message in messages]
    parts: list[tuple[int | None, str]] = list(enumerate(roles))
    if add_generation_prompt and ends[-1] < len(text):
        parts.append((None, "assistant"))
        ends.append(len(text))
    ends[-1] = len(text)
    bounds = [_tokens_before(end, coded["offset_mapping"]) for end in ends]
    bounds[-1] = len(coded["input_ids"])
    starts = [0, *bounds[:-1]]
    spans = [
        MessageSpan(message=number, role=role, start=start, end=end)
        for (number, role), start, end in zip(parts, starts, bounds, strict=True)
    ]
    return ChatTokens(tokens=torch.tensor([coded["input_ids"]], dtype=torch.long), spans=spans)


def _tokens_before(end: int, offsets: Sequence[tuple[int, int]]) -> int:
    """How many tokens begin before the character ``end``."""
    return sum(1 for start, _ in offsets if start < end)


def _message_ends(
    messages: Sequence[Mapping[str, Any]], render: Render, text: str, add_generation_prompt: bool
) -> list[int]:
    """The character behind each message, header and end of it included, in order.

    A conversation that ends with a message is written as the beginning of the longer one by most formats. Where it
    is not (a format that treats the last message in its own way, or refuses one that ends so), the next message
    begins behind the content of this one.
    """
    ends: list[int] = []
    for number in range(1, len(messages) + 1):
        whole = number == len(messages)
        known = text if whole and not add_generation_prompt else _rendered(messages[:number], render)
        if known is not None and text.startswith(known):
            end = len(known)
        else:
            end = _content_end(messages, number - 1, render, text, add_generation_prompt)
        ends.append(max(end, ends[-1] if ends else 0))
    return ends


def _rendered(messages: Sequence[Mapping[str, Any]], render: Render) -> str | None:
    try:
        return render(messages, False)
    except RequestError:
        return None


def _content_end(
    messages: Sequence[Mapping[str, Any]], number: int, render: Render, text: str, add_generation_prompt: bool
) -> int:
    """Where the content of a message ends, by a mark put behind it: the texts differ from there on."""
    marked = [dict(message) for message in messages]
    marked[number]["content"] = f"{marked[number].get('content') or ''}{_MARK}"
    try:
        other = render(marked, add_generation_prompt)
    except RequestError:
        return 0
    same = 0
    for ours, theirs in zip(text, other, strict=False):
        if ours != theirs:
            break
        same += 1
    return same
