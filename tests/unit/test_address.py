"""Addresses: the grammar, its round trip, and what exists on a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from interp_core.address import COORDINATE_AXES, Address, parse_address, parse_pattern
from interp_core.errors import AddressError
from interp_core.facts import ModelFacts
from interp_core.points import GENERAL_POINTS
from interp_core.resolution import axis_sizes, resolve_address, resolve_addresses

FACTS = ModelFacts.from_config(
    LlamaConfig(
        vocab_size=512,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
    )
)

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True).filter(lambda name: name != "path")
COORDINATES = st.dictionaries(st.sampled_from(sorted(COORDINATE_AXES)), st.integers(0, 10**6)).map(
    lambda found: tuple(found.items())
)


def resolve(value: object) -> Address:
    return resolve_address(value, GENERAL_POINTS, FACTS)


def resolve_all(values: object) -> list[str]:
    return [str(a) for a in resolve_addresses(values, GENERAL_POINTS, FACTS)]


@given(st.builds(Address, NAMES, st.none() | st.integers(0, 10**6), COORDINATES))
def test_text_round_trip(address: Address) -> None:
    assert parse_address(str(address)) == address
    assert Address.parse(address) is address
    assert hash(parse_address(str(address))) == hash(address)


@given(NAMES, st.integers(0, 500))
def test_a_tuple_is_the_text(name: str, layer: int) -> None:
    assert parse_address((name, layer)) == parse_address(f"{name}.{layer}") == Address(name, layer)
    assert parse_address((name,)) == parse_address((name, None)) == Address(name)


@given(st.text(max_size=30) | st.none() | st.floats() | st.binary(max_size=4) | st.lists(st.integers(), max_size=2))
def test_anything_is_an_address_or_one_clear_error(value: Any) -> None:
    try:
        address = parse_pattern(value).address
    except AddressError as error:
        assert str(error)  # noqa: PT017 - either outcome is right
    else:
        assert address.name in value


@pytest.mark.parametrize("kind", [np.int8, np.int64, np.uint16])
def test_numpy_integers_are_layers(kind: Any) -> None:
    address = resolve(("resid_post", kind(3)))
    assert address == Address("resid_post", 3)
    assert type(address.layer) is int


def test_parts() -> None:
    address = parse_address("z.3.head-4")
    assert (address.name, address.layer, address.coordinates) == ("z", 3, (("head", 4),))
    assert (address.coordinate("head"), address.coordinate("neuron")) == (4, None)
    assert address.bare() == Address("z", 3)
    assert parse_address("resid_post.2").module_path is None
    assert parse_address("path.model.layers.0.mlp").module_path == "model.layers.0.mlp"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "is not an address"),
        ("Resid_post.1", "is not an address"),
        ("resid_post.-1", "never negative"),
        ("resid_post.+1", "never negative"),
        (("resid_post", -1), "never negative"),
        (("resid_post", np.int64(-1)), "never negative"),
        (("resid_post", True), "whole number"),
        (("resid_post", np.True_), "whole number"),
        (("resid_post", 1.0), "whole number"),
        (("resid_post", "1"), "whole number"),
        (("resid_post.1", 1), "twice"),
        (("z", 1, 2), "(name, layer)"),
        ((), "(name, layer)"),
        ((3, "z"), "(name, layer)"),
        (3, "is not an address"),
        (True, "is not an address"),
        (None, "is not an address"),
        (["z", 1], "is not an address"),
        ("z.1.head", "is not a coordinate"),
        ("z.head-1.1", "is not a coordinate"),
        ("z.1.haed-1", "'head'"),
        ("z.1.head--1", "never negative"),
        ("z.1.head-1.head-2", "twice"),
        ("z..head-1", "is not a coordinate"),
        ("path.", "module path"),
        ("path.model..mlp", "module path"),
        ("resid_post.0-3", "several layers"),
        ("resid_post.*", "several layers"),
    ],
)
def test_what_is_no_address(value: object, said: str) -> None:
    with pytest.raises(AddressError) as raised:
        parse_address(value)
    assert said in str(raised.value)
    assert raised.value.__cause__ is None


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("resid_post", "from 0 to 3"),
        ("resid_post.4", "0 to 3"),
        (("resid_post", np.int64(4)), "0 to 3"),
        ("resid_pots.1", "'resid_post'"),
        ("embeddings.0", "takes no layer"),
        ("z.1.head-6", "0 to 5"),
        ("value.1.kv_head-2", "0 to 1"),
        ("mlp_act.0.neuron-160", "0 to 159"),
        ("z.1.neuron-0", "has no neuron axis; its coordinates are head"),
        ("resid_post.1.head-0", "it takes no coordinate"),
    ],
)
def test_what_this_model_does_not_have(value: object, said: str) -> None:
    with pytest.raises(AddressError, match=r"\S") as raised:
        resolve(value)
    assert said in str(raised.value)


def test_ranges_expand_in_order_and_duplicates_go() -> None:
    assert resolve_all(["resid_post.1-2", "resid_post.*", "embeddings", ("resid_post", np.int64(3))]) == [
        "resid_post.1",
        "resid_post.2",
        "resid_post.0",
        "resid_post.3",
        "embeddings",
    ]
    assert resolve_all(["z.2-3.head-1"]) == ["z.2.head-1", "z.3.head-1"]
    assert resolve_all([]) == []
    assert resolve_all("resid_post.0 z.1".split()) == ["resid_post.0", "z.1"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("resid_post.1", "not one string"),
        (Address("resid_post", 1), "not one string"),
        (3, "a list of addresses"),
        (None, "a list of addresses"),
        (["resid_post.2-4"], "0 to 3"),
        (["resid_post.3-1"], "ends before it begins"),
        (["resid_pots.*"], "'resid_post'"),
        (["embeddings.*"], "takes no layer"),
        (["embeddings.0-1"], "takes no layer"),
        ([True], "is not an address"),
    ],
)
def test_what_is_no_list_of_addresses(values: object, said: str) -> None:
    with pytest.raises(AddressError) as raised:
        resolve_all(values)
    assert said in str(raised.value)


def test_a_coordinate_removes_its_axis() -> None:
    spec = GENERAL_POINTS["z"]
    assert axis_sizes(resolve("z.1"), spec, FACTS) == (6, 16)
    assert axis_sizes(resolve("z.1.head-5"), spec, FACTS) == (16,)
    assert axis_sizes(resolve("resid_post.0"), GENERAL_POINTS["resid_post"], FACTS) == (96,)


def test_a_module_path_is_left_to_the_loaded_model() -> None:
    assert str(resolve("path.model.norm")) == "path.model.norm"
