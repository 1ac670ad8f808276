"""Conversations through a checkpoint's template, or through Python code of its own, which runs where it is trusted."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from interp_core import InterpModel, ModelUnavailable, RequestError, load_model

CODE = """
from pathlib import Path

def encode_messages(messages, thinking_mode, context=None):
    Path(__file__).with_name("ran").touch()
    text = "<s>"
    for message in messages:
        text += f"[{message['role']}]{message['content']}"
        if message["role"] == "user":
            text += "[assistant]" + {"chat": "", "thinking": "[think]"}[thinking_mode]
    return text
"""

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration and a tokenizer without a template; no weights are needed."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=["<s>", "</s>"]))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(tmp_path)
    LlamaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=1).save_pretrained(tmp_path)
    return tmp_path


def with_code(folder: Path, code: str = CODE, name: str = "encoding_tiny.py") -> Path:
    """The same checkpoint with a chat format in code."""
    (folder / "encoding").mkdir(exist_ok=True)
    (folder / "encoding" / name).write_text(code, encoding="utf-8")
    return folder


def trusted(folder: Path) -> InterpModel:
    """A model whose checkpoint may run code."""
    return load_model(folder, backend="eager", trust_remote_code=True)


def test_code_is_refused_and_never_run_without_trust(folder: Path) -> None:
    model = load_model(with_code(folder), backend="eager")
    with pytest.raises(RequestError, match=r"encoding/encoding_tiny\.py.*trust_remote_code=True"):
        model.chat_tokens(HELLO)
    assert not (folder / "encoding" / "ran").exists()


def test_trusted_code_writes_the_conversation(folder: Path) -> None:
    model = trusted(with_code(folder))
    ids = model.chat_tokens(HELLO)
    assert model.to_string(ids) == "<s>[user]hello[assistant]"
    # One beginning of text, which the code wrote.
    assert ids[0].tolist().count(model.tokenizer.bos_token_id) == 1
    assert (folder / "encoding" / "ran").exists()


def test_options_reach_the_code(folder: Path) -> None:
    ids = trusted(with_code(folder)).chat_tokens(HELLO, thinking_mode="thinking")
    assert trusted(folder).to_string(ids).endswith("[think]")


def test_what_the_code_cannot_leave_out_is_refused(folder: Path) -> None:
    model = trusted(with_code(folder))
    with pytest.raises(RequestError, match="add_generation_prompt=False"):
        model.chat_tokens(HELLO, add_generation_prompt=False)
    answered = [*HELLO, {"role": "assistant", "content": "hi"}]
    assert model.to_string(model.chat_tokens(answered, add_generation_prompt=False)).endswith("[assistant]hi")


@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        ("raise ValueError('broken')", ModelUnavailable, "broken"),
        ("x = 1", ModelUnavailable, "encode_messages"),
        ("import sys; sys.exit(3)", ModelUnavailable, "SystemExit"),
        ("def encode_messages(messages, thinking_mode): return 3", ModelUnavailable, "int, not text"),
        ("def encode_messages(messages, thinking_mode): return messages[0]['nothing']", RequestError, "do not fit"),
    ],
)
def test_code_that_fails_is_one_clear_error(folder: Path, code: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        trusted(with_code(folder, code)).chat_tokens(HELLO)


def test_several_files_are_not_guessed_among(folder: Path) -> None:
    with_code(folder)
    model = trusted(with_code(folder, name="encoding_other.py"))
    with pytest.raises(ModelUnavailable, match=r"encoding_other\.py, encoding_tiny\.py"):
        model.chat_tokens(HELLO)


def test_a_template_is_preferred_to_code(folder: Path) -> None:
    model = load_model(with_code(folder), backend="eager")
    model.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert model.to_string(model.chat_tokens(HELLO)) == "hello"


def test_no_format_at_all_is_said(folder: Path) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        load_model(folder, backend="eager").chat_tokens(HELLO)


def test_the_callers_messages_are_not_changed(folder: Path) -> None:
    code = CODE.replace('text = "<s>"', 'messages[0]["content"] = "spoiled"; text = "<s>"')
    messages = [{"role": "user", "content": "hello"}]
    trusted(with_code(folder, code)).chat_tokens(messages)
    assert messages == HELLO


def test_text_is_no_conversation(folder: Path) -> None:
    for wrong in ("hello", ["hello"]):
        with pytest.raises(RequestError, match="list of messages"):
            trusted(with_code(folder)).chat_tokens(wrong)


CHATML = (
    "{% if messages[0]['role'] != 'system' %}<s>[system]be kind;{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# The last message is written in another way, thoughts of earlier answers are left out, and users come first.
UNUSUAL = (
    "{% if messages[0]['role'] != 'user' %}{{ raise_exception('a user speaks first') }}{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'].split('|')[-1] if not loop.last else m['content'] }}"
    "{{ '!' if loop.last else '.' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "thinking|hi é"},
    {"role": "user", "content": "漢字?"},
]


def with_template(folder: Path, template: str) -> InterpModel:
    model = load_model(folder, backend="eager")
    model.tokenizer.chat_template = template
    return model


@pytest.mark.parametrize("opening", [True, False])
@pytest.mark.parametrize("template", [CHATML, UNUSUAL])
def test_spans_cover_every_token_in_order(folder: Path, template: str, opening: bool) -> None:
    model = with_template(folder, template)
    found = model.chat_spans(TALK, add_generation_prompt=opening)
    assert found.tokens.tolist() == model.chat_tokens(TALK, add_generation_prompt=opening).tolist()
    assert [span.message for span in found.spans] == [0, 1, 2, *([None] if opening else [])]
    assert [span.role for span in found.spans] == ["user", "assistant", "user", *(["assistant"] if opening else [])]
    assert found.spans[0].start == 0
    assert found.spans[-1].end == found.tokens.shape[1]
    assert all(a.end == b.start and a.start < a.end for a, b in zip(found.spans, found.spans[1:], strict=False))


def test_each_span_is_its_message(folder: Path) -> None:
    found = (model := with_template(folder, CHATML)).chat_spans(TALK)
    texts = [model.to_string(found.tokens[:, span.start : span.end]) for span in found.spans]
    assert texts == ["<s>[system]be kind;[user]hello;", "[assistant]thinking|hi é;", "[user]漢字?;", "[assistant]"]
    assert found.positions(-1) == list(range(found.spans[2].start, found.spans[2].end))
    unusual = (model := with_template(folder, UNUSUAL)).chat_spans(TALK)
    texts = [model.to_string(unusual.tokens[:, span.start : span.end]) for span in unusual.spans]
    for text, content in zip(texts, ("hello", "hi é", "漢字?", "<assistant>"), strict=True):
        assert content in text
    with pytest.raises(RequestError, match="no number 3"):
        unusual.positions(3)


def test_spans_of_nothing_and_of_code(folder: Path) -> None:
    with pytest.raises(RequestError, match="no spans"):
        with_template(folder, CHATML).chat_spans([])
    with pytest.raises(RequestError, match="do not fit"):
        with_template(folder, UNUSUAL).chat_spans([{"role": "assistant", "content": "x"}])
    model = trusted(with_code(folder))
    found = model.chat_spans(HELLO)
    assert found.tokens.tolist() == model.chat_tokens(HELLO).tolist()
    assert found.spans[-1].end == found.tokens.shape[1]
