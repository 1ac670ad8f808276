"""Text as it comes: pieces join to the text of the whole, and stop strings never leak."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from interp_core.text import TextStream

HARD = "é漢字🙂"


def byte_level() -> PreTrainedTokenizerFast:
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.train_from_iterator(
        ["the capital of france is paris and the capital of italy is rome " * 4],
        trainers.BpeTrainer(
            vocab_size=400,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<s>", "</s>"],
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=found, bos_token="<s>", eos_token="</s>")


TOKENIZER = byte_level()


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def run(ids: list[int], prompt: list[int] | None = None, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(TOKENIZER, prompt or [], stop)
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        assert stream.text == "".join(pieces)
        if stream.stopped:
            break
    pieces.append(stream.finish())
    assert stream.text == "".join(pieces)
    return pieces, stream


def test_characters_of_many_tokens_come_whole() -> None:
    ids = ids_of(HARD)
    assert len(ids) == 12
    pieces, stream = run(ids)
    assert [piece for piece in pieces if piece] == list(HARD)
    assert stream.text == HARD
    assert stream.finish() == ""


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=20), st.text(max_size=10))
def test_pieces_join_to_the_text(text: str, prompt: str) -> None:
    text, prompt = (t.encode("utf-8", "ignore").decode() for t in (text, prompt))
    assert run(ids_of(text), ids_of(prompt))[1].text == text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=20))
def test_any_ids_at_all_join_to_the_decoded_text(ids: list[int]) -> None:
    assert run(ids)[1].text == TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_an_end_inside_a_character_shows_at_the_end_only() -> None:
    pieces, stream = run(ids_of("a🙂")[:-1])
    assert stream.text.startswith("a")
    assert "\ufffd" in stream.text
    assert pieces[0] == "a"
    assert pieces[1:-1] == ["", "", ""][: len(pieces) - 2]


def test_a_prompt_that_ends_inside_a_character() -> None:
    ids = ids_of("🙂 rome")
    assert run(ids[2:], ids[:2])[1].text.endswith(" rome")


def test_the_first_word_keeps_its_space() -> None:
    whole = ids_of("the capital of france is paris")
    assert run(whole[-2:], whole[:-2])[1].text == TOKENIZER.decode(whole[-2:])


def test_special_tokens_are_not_text() -> None:
    assert run([TOKENIZER.bos_token_id, *ids_of("rome"), TOKENIZER.eos_token_id])[1].text == "rome"


def test_a_stop_string_over_many_tokens_never_leaks() -> None:
    ids = ids_of("rome" + HARD + "paris")
    pieces, stream = run(ids, stop=("漢字",))
    assert stream.stopped
    assert stream.text == "romeé"
    assert "".join(pieces) == "romeé"
    assert len(stream.ids) < len(ids)
    assert stream.push(5) == stream.finish() == ""


def test_the_earliest_stop_wins_not_the_first_named() -> None:
    assert run(ids_of("abc def ghi"), stop=("ghi", "def"))[1].text == "abc "
    assert run(ids_of("abcd"), stop=("bcd", "c"))[1].text in ("a", "ab")


def test_what_may_begin_a_stop_string_is_held_back_and_then_given() -> None:
    stream = TextStream(TOKENIZER, [], ("xyz",))
    a, x, y, q, z = (ids_of(c)[0] for c in "axyqz")
    assert [stream.push(i) for i in (a, x, y, q, x, x, y)] == ["a", "", "", "xyq", "", "x", ""]
    assert stream.finish() == "xy"
    stream = TextStream(TOKENIZER, [], ("xyz",))
    assert [stream.push(i) for i in (a, x, y, z)] == ["a", "", "", ""]
    assert (stream.text, stream.stopped) == ("a", True)


def test_a_stop_string_of_the_prompt_is_no_stop() -> None:
    assert run(ids_of(" rome"), ids_of("paris"), stop=("paris", "s r"))[1].text == " rome"


@settings(max_examples=200, deadline=None)
@given(st.text("ab🙂é", max_size=16), st.lists(st.text("ab🙂é", min_size=1, max_size=3), min_size=1, max_size=3))
def test_stops_against_the_whole_text(text: str, stops: list[str]) -> None:
    _, stream = run(ids_of(text), stop=tuple(stops))
    # Token by token: the stream ends at the first token after which any stop string is there.
    expected = text
    for n in range(len(text) + 1):
        found = [text[:n].find(s) for s in stops if s in text[:n]]
        if found:
            expected = text[: min(found)]
            break
    assert stream.text == expected
    assert stream.stopped == any(s in text for s in stops)


@pytest.mark.parametrize("prompt", [[], [0]])
def test_nothing(prompt: Any) -> None:
    assert run([], prompt)[1].text == ""
