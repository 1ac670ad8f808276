"""Token input: every form that is taken, and one clear error for everything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from interp_core.errors import RequestError
from interp_core.facts import ModelFacts
from interp_core.tokens import TokenBatch, read_tokens, select_positions

torch.set_num_threads(1)
FACTS = ModelFacts.from_config(LlamaConfig(vocab_size=100, num_hidden_layers=2, max_position_embeddings=16))


def read(tokens: Any, mask: Any = None, room: int = 0) -> TokenBatch:
    return read_tokens(tokens, FACTS, mask, room=room)


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3]),
        np.array([1, 2, 3], dtype=np.int8),
        [np.int64(1), 2, np.uint8(3)],
        torch.tensor([1, 2, 3]),
        torch.tensor([[1, 2, 3]], dtype=torch.int32),
        list(torch.tensor([1, 2, 3])),
    ],
)
def test_one_prompt(tokens: Any) -> None:
    batch = read(tokens)
    assert batch == TokenBatch(rows=[(1, 2, 3)], offsets=[0], width=3, single=True)
    assert all(type(token) is int for token in batch.rows[0])


@pytest.mark.parametrize(
    "tokens",
    [
        [[1, 2, 3], [4]],
        [(1, 2, 3), range(4, 5)],
        [torch.tensor([1, 2, 3]), torch.tensor([4])],
        [np.array([1, 2, 3]), [4]],
    ],
)
def test_a_batch_of_unequal_lengths(tokens: Any) -> None:
    batch = read(tokens)
    assert (batch.rows, batch.offsets, batch.width, batch.single) == (((1, 2, 3), (4,)), (0, 0), 3, False)
    assert batch.lengths == (3, 1)


def test_a_list_of_one_list_is_a_batch() -> None:
    assert not read([[1, 2]]).single
    assert read(torch.tensor([[1], [2]])).rows == ((1,), (2,))


def test_the_callers_own_lists_stay_as_they_are() -> None:
    tokens = [np.int64(1), np.int64(2)]
    read(tokens)
    assert all(type(t) is np.int64 for t in tokens)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([], "nothing to run"),
        ([[]], "prompt is empty"),
        ([[1], []], "prompt 1: there is nothing to run"),
        (torch.zeros(0, dtype=torch.long), "nothing to run"),
        (torch.zeros(2, 0, dtype=torch.long), "nothing to run"),
        (np.zeros((0, 3), dtype=int), "nothing to run"),
        ([1, 100], "outside the vocabulary (0 to 99)"),
        ([-1], "outside the vocabulary"),
        ([[1], [2**40]], "prompt 1: token id"),
        (torch.tensor([100]), "outside the vocabulary"),
        ([True], "integers"),
        ([np.True_], "integers"),
        (torch.tensor([True, False]), "integers"),
        (np.array([True]), "integers"),
        ([1.0], "integers"),
        ([None], "integers"),
        (torch.tensor([1.0]), "integers"),
        (np.array([1.0]), "integers"),
        ([1, [2]], "mixes ids and lists"),
        ([[[1]]], "integers"),
        (torch.zeros(1, 1, 1, dtype=torch.long), "[seq] or [batch, seq]"),
        (torch.tensor(3), "[seq] or [batch, seq]"),
        ("text", "not text"),
        (["some", "texts"], "not text"),
        (3, "a tensor or a list of ids"),
        (None, "a tensor or a list of ids"),
        ({1, 2}, "a tensor or a list of ids"),
        ([1] * 17, "17 tokens are more than this model takes (16)"),
    ],
)
def test_what_is_no_prompt(tokens: Any, said: str) -> None:
    with pytest.raises(RequestError) as raised:
        read(tokens)
    assert said in str(raised.value)


def test_room_for_new_tokens() -> None:
    assert read([1] * 16).lengths == (16,)
    assert read([1] * 10, room=6).lengths == (10,)
    with pytest.raises(RequestError, match="max_tokens can be at most 6"):
        read([1] * 10, room=7)


TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])


@pytest.mark.parametrize("convert", [torch.tensor, np.array, list, lambda m: torch.tensor(m).bool()])
def test_padding_on_either_side(convert: Any) -> None:
    batch = read(TOKENS, convert([[0, 0, 1, 1], [1, 1, 1, 0]]))
    assert (batch.rows, batch.offsets, batch.width) == (((3, 4), (5, 6, 7)), (2, 0), 4)
    assert not batch.single


def test_a_mask_of_one_prompt() -> None:
    assert read([1, 2, 3], [0, 1, 1]).rows == ((2, 3),)
    assert read(TOKENS[:1], torch.tensor([[0, 1, 1, 0]])).offsets == (1,)


def test_ids_under_padding_are_not_looked_at() -> None:
    assert read([[-1, 2], [3, 999]], [[0, 1], [1, 0]]).rows == ((2,), (3,))
    assert read([0] * 20 + [1], [0] * 20 + [1]).lengths == (1,)


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        ([[1, 0, 1, 1], [1, 1, 1, 1]], "prompt 0: attention_mask has a hole"),
        ([[1, 1, 1, 1], [0, 0, 0, 0]], "prompt 1: attention_mask leaves no token"),
        ([[1, 2, 1, 1], [1, 1, 1, 1]], "other than 0 and 1"),
        ([[1, 1, 1, 1]], "shape"),
        ([[1, 1, 1], [1, 1, 1]], "shape"),
        ([1, 1, 1, 1], "shape"),
        ([], "shape"),
        (torch.ones(2, 4, 4), "other than 0 and 1"),
        (3, "attention_mask"),
    ],
)
def test_what_is_no_mask(mask: Any, said: str) -> None:
    with pytest.raises(RequestError) as raised:
        read(TOKENS, mask)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("positions", "chosen"),
    [
        (None, None),
        ("last", (4,)),
        (slice(1, 3), (1, 2)),
        (slice(None, None, -2), (4, 2, 0)),
        (slice(-2, None), (3, 4)),
        (0, (0,)),
        (np.int64(3), (3,)),
        ([3, 1], (3, 1)),
        ([], ()),
        (np.array([0, 4]), (0, 4)),
        (torch.tensor([0, 4]), (0, 4)),
        (torch.tensor(2), (2,)),
        (range(2), (0, 1)),
    ],
)
def test_positions(positions: Any, chosen: Any) -> None:
    assert select_positions(positions, 5) == chosen


@pytest.mark.parametrize("positions", ["first", 5, -1, [0, 5], [True], True, 1.0, [0.0], ["last"], {0: 1}, np.True_])
def test_what_is_no_position(positions: Any) -> None:
    with pytest.raises(RequestError, match="position"):
        select_positions(positions, 5)
