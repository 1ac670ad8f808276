"""Text to tokens and back, the same on every backend."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from interp_core.chat_code import chat_code, encoded_chat
from interp_core.configuration import read_configuration
from interp_core.errors import BackendUnavailable, ModelUnavailable, RequestError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["chat_ids", "chat_text", "has_tokenizer", "load_tokenizer", "text_ids", "token_strings"]

_FILES: Final = ("tokenizer*", "vocab*", "merges.txt", "*.tiktoken", "spiece.model", "sentencepiece*")


def load_tokenizer(model_id: str, *, trust_remote_code: bool, classes: Mapping[str, str] | None = None) -> Any:
    """The checkpoint's own tokenizer.

    ``classes`` are configuration classes of architectures, as :func:`read_configuration` takes them.

    Raises:
        ModelUnavailable: the checkpoint has none that can be read.
        BackendUnavailable: transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise BackendUnavailable("tokenizers need transformers: pip install interp-eager (or interp-vllm)") from error
    try:
        # Given, because transformers' registry may hold somebody else's class for this model type by now.
        config = read_configuration(model_id, trust_remote_code=trust_remote_code, classes=classes)
        tokenizer = AutoTokenizer.from_pretrained(model_id, config=config, trust_remote_code=trust_remote_code)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelUnavailable(f"{model_id}: its tokenizer cannot be read: {reason}. Token ids still work.") from error
    # Where there are no files, transformers makes a tokenizer of some families that knows no text at all.
    if not has_tokenizer(model_id) and not tokenizer.encode("a", add_special_tokens=False):
        raise ModelUnavailable(f"{model_id} has no tokenizer. Token ids still work.")
    return tokenizer


def has_tokenizer(model_id: str) -> bool:
    """Whether a checkpoint folder holds files of a tokenizer at all; a hub id is taken to have one."""
    folder = Path(model_id).expanduser()
    return not folder.is_dir() or any(next(folder.glob(pattern), None) for pattern in _FILES)


def text_ids(tokenizer: Any, text: str | Sequence[str], *, add_special_tokens: bool) -> Tensor | list[list[int]]:
    """Ids of a text as ``[1, seq]``; of several texts as ``[batch, seq]``, or as lists if lengths differ.

    Raises:
        RequestError: ``text`` is not text.
    """
    import torch

    texts = [text] if isinstance(text, str) else list(text) if isinstance(text, Sequence) else []
    if not texts or not all(isinstance(t, str) for t in texts):
        raise RequestError("text is a string, or a list of strings")
    rows = [list(tokenizer.encode(t, add_special_tokens=add_special_tokens)) for t in texts]
    if len({len(row) for row in rows}) > 1:
        return rows
    return torch.tensor(rows, dtype=torch.long)


def chat_ids(
    tokenizer: Any, messages: Sequence[Any], *, add_generation_prompt: bool, model_id: str, trust: bool, **options: Any
) -> Tensor:
    """Ids ``[1, seq]`` of a conversation, through the checkpoint's chat template or, where trusted, its own code.

    The format writes every special token that there is, so none is added a second time.

    Raises:
        RequestError, ModelUnavailable: as :func:`chat_text`.
    """
    import torch

    text = chat_text(
        tokenizer, messages, add_generation_prompt=add_generation_prompt, model_id=model_id, trust=trust, **options
    )
    return torch.tensor([tokenizer.encode(text, add_special_tokens=False)], dtype=torch.long)


def chat_text(
    tokenizer: Any, messages: Sequence[Any], *, add_generation_prompt: bool, model_id: str, trust: bool, **options: Any
) -> str:
    """A conversation as the checkpoint's format writes it.

    Raises:
        RequestError: the checkpoint has no chat format, or one that is code and not trusted, or the messages do not
            fit it.
        ModelUnavailable: its code cannot be used.
    """
    if isinstance(messages, str) or not all(isinstance(message, Mapping) for message in messages):
        raise RequestError("a conversation is a list of messages such as {'role': 'user', 'content': 'hello'}")
    # Neither a template nor somebody's code gets at the caller's own.
    messages = copy.deepcopy(list(messages))
    if not getattr(tokenizer, "chat_template", None):
        return _by_code(model_id, messages, add_generation_prompt, trust, options)
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **options
        )
    except Exception as error:
        raise RequestError(f"the messages do not fit this checkpoint's chat template: {error}") from error
    return text


def _by_code(
    model_id: str, messages: Sequence[Any], add_generation_prompt: bool, trust: bool, options: dict[str, Any]
) -> str:
    file = chat_code(model_id)
    if file is None:
        raise RequestError(
            "this checkpoint has no chat template: write the conversation as text and use to_tokens(text)"
        )
    if not trust:
        raise RequestError(
            f"this checkpoint's chat format is Python code ({file.parent.name}/{file.name}), not a template, and "
            "is run only with load_model(..., trust_remote_code=True); read it first, or write the conversation as "
            "text and use to_tokens(text)"
        )
    return encoded_chat(file, messages, add_generation_prompt=add_generation_prompt, options=options)


def token_strings(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Each token as text. A token that is only part of a character is shown by its vocabulary entry."""
    found = []
    for token in ids:
        text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        if "\ufffd" in text or text == "":
            # Models often have more embedding rows than the tokenizer has entries.
            text = tokenizer.convert_ids_to_tokens(int(token)) or f"<{int(token)}>"
        found.append(text)
    return found
