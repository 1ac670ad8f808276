"""Steering: operations checked against a model, where they write, and blocks that nest."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from interp_core import (
    Ablate,
    Add,
    AddressError,
    Apply,
    BackendSpec,
    Cap,
    CapabilityUnsupported,
    InterpModel,
    NormScaledAdd,
    PluginHost,
    Replace,
    RequestError,
    Scale,
    Swap,
    hookimpl,
    load_model,
    steer,
)
from interp_core.points import GENERAL_POINTS, hook
from interp_core.requests import Where
from interp_core.steering import active_steering, as_steering, writes_for

torch.set_num_threads(1)
AT = "resid_post.1"
V = torch.arange(1.0, 9.0)


class Plugin:
    @hookimpl
    def interp_backends(self) -> list[BackendSpec]:
        points = {name: hook(writable=name != "mlp_pre", why="no reason") for name in GENERAL_POINTS}
        capabilities = {"capture", "steer", "apply", "module_path"}
        return [BackendSpec(name="b", summary="x", factory="nowhere:B", points=points, capabilities=capabilities)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> InterpModel:
    path = tmp_path_factory.mktemp("llama")
    LlamaConfig(
        vocab_size=64,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
    ).save_pretrained(path)
    return load_model(path, "b", host=PluginHost(discover=False, plugins=[("p", Plugin())]))


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "width": (lambda: Add(AT, V[:7]), RequestError, "takes [8]"),
    "scalar": (lambda: Add(AT, 1.0), RequestError, "shape []"),
    "rows": (lambda: Add(AT, torch.ones(2, 8)), RequestError, "shape [2, 8]"),
    "transposed": (lambda: Add("z.1", torch.ones(4, 5)), RequestError, "[4, 4] or [16]"),
    "nan": (lambda: Add(AT, V * math.nan), RequestError, "not finite"),
    "inf": (lambda: Replace(AT, V * math.inf), RequestError, "not finite"),
    "bool": (lambda: Add(AT, V > 2), RequestError, "real numbers"),
    "complex": (lambda: Add(AT, V * 1j), RequestError, "real numbers"),
    "text": (lambda: Add(AT, "vector"), RequestError, "not a tensor"),
    "no vector": (lambda: Add(AT, None), RequestError, "vector"),
    "no value": (lambda: Replace(AT, None), RequestError, "value"),
    "no direction": (lambda: Scale(AT, None), RequestError, "vector"),
    "nan scale": (lambda: Add(AT, V, scale=math.nan), RequestError, "scale is a finite number"),
    "bool scale": (lambda: Add(AT, V, scale=True), RequestError, "scale is a finite number"),
    "text factor": (lambda: Scale(AT, V, factor="2"), RequestError, "factor is a finite number"),
    "infinite low": (lambda: Cap(AT, V, low=-math.inf), RequestError, "low is a finite number"),
    "empty cap": (lambda: Cap(AT, V), RequestError, "low, high or both"),
    "crossed cap": (lambda: Cap(AT, V, low=1.0, high=0.0), RequestError, "above"),
    "zero scale": (lambda: Scale(AT, 0 * V), RequestError, "no direction"),
    "zero cap": (lambda: Cap(AT, 0 * V, low=0.0), RequestError, "no direction"),
    "zero step": (lambda: NormScaledAdd(AT, 0 * V), RequestError, "no direction"),
    "zero ablate": (lambda: Ablate(AT, 0 * V), RequestError, "no direction"),
    "zero swap": (lambda: Swap(AT, V, 0 * V), RequestError, "second is zero"),
    "parallel": (lambda: Swap(AT, V, 2 * V), RequestError, "parallel"),
    "opposite": (lambda: Swap(AT, V, -V), RequestError, "parallel"),
    "unknown": (lambda: Add("resid_pots.1", V), AddressError, "'resid_post'"),
    "layer": (lambda: Add("resid_post.3", V), AddressError, "0 to 2"),
    "range": (lambda: Add("resid_post.1-3", V), AddressError, "0 to 2"),
    "no layer": (lambda: Add("resid_post", V), AddressError, "needs a layer"),
    "not writable": (lambda: Add("mlp_pre.1", torch.ones(12)), CapabilityUnsupported, "no reason"),
    "not callable": (lambda: Apply(AT, 3), RequestError, "not callable"),
    "path": (lambda: Add("path.model.norm", V), AddressError, "use Apply"),
    "no operation": (lambda: [V], RequestError, "takes operations"),
    "a number": (lambda: 3, RequestError, "takes operations"),
    "text for all": (lambda: "resid_post.1", RequestError, "takes operations"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_runs(model: InterpModel, case: str) -> None:
    make, kind, said = REFUSED[case]
    with pytest.raises(kind) as raised:
        as_steering(model.profile, make())
    assert said in str(raised.value)
    assert not model.session.warm


def test_nowhere_is_refused(model: InterpModel) -> None:
    with pytest.raises(RequestError, match="nowhere"):
        as_steering(model.profile, Add(AT, V), prompt=False, generated=False)


@pytest.mark.parametrize("value", [V, V.tolist(), V.numpy(), V.int(), V.numpy().astype(np.int64), tuple(range(1, 9))])
def test_vectors_of_many_kinds(model: InterpModel, value: Any) -> None:
    (write,) = as_steering(model.profile, Add(AT, value)).writes
    assert torch.equal(write.operation.vector, V)  # type: ignore[attr-defined]


def test_shapes_flat_and_whole(model: InterpModel) -> None:
    for shape in ((16,), (4, 4)):
        (write,) = as_steering(model.profile, Add("z.1", torch.ones(shape))).writes
        assert write.operation.vector.shape == (16,)  # type: ignore[attr-defined]
    (write,) = as_steering(model.profile, Add("z.1.head-2", torch.ones(4))).writes
    assert str(write.address) == "z.1.head-2"
    (write,) = as_steering(model.profile, Replace("z.1", torch.ones(3, 4, 4))).writes
    assert write.operation.value.shape == (3, 16)  # type: ignore[attr-defined]
    (write,) = as_steering(model.profile, Ablate(AT)).writes
    assert write.operation.vector is None  # type: ignore[attr-defined]


def test_a_range_is_one_write_per_layer_in_order(model: InterpModel) -> None:
    steering = as_steering(model.profile, [Add("resid_post.*", V), Scale(AT, V)])
    assert [str(w.address) for w in steering.writes] == ["resid_post.0", "resid_post.1", "resid_post.2", AT]
    assert as_steering(model.profile, steering) is steering


def test_blocks_nest_outer_first_and_end(model: InterpModel) -> None:
    def fail_inside() -> None:
        with steer(model, Ablate(AT)):
            assert len(active_steering(model)) == 3
            raise KeyError

    assert active_steering(model) == ()
    with steer(model, Add(AT, V)), model.steer(Scale(AT, V), positions="last", generated=False):
        outer, inner = active_steering(model)
        writes = writes_for((outer, inner), 5)
        assert [type(w.operation) for w in writes] == [Add, Scale]
        assert [w.where for w in writes] == [Where(), Where(positions=frozenset({4}), generated=False)]
        with pytest.raises(KeyError):
            fail_inside()
        assert active_steering(model) == (outer, inner)
    assert active_steering(model) == ()


def test_a_block_steers_one_model_in_one_thread(model: InterpModel) -> None:
    other, seen = InterpModel(model.profile), []
    with steer(model, Add(AT, V)):
        assert active_steering(other) == ()
        thread = threading.Thread(target=lambda: seen.append(active_steering(model)))
        thread.start()
        thread.join()
    assert seen == [()]


@pytest.mark.parametrize(
    ("positions", "chosen"),
    [(None, None), ("last", {4}), (slice(1, 3), {1, 2}), (2, {2}), ([0, 9], {0, 9}), (np.array([1]), {1})],
)
def test_positions(model: InterpModel, positions: Any, chosen: set[int] | None) -> None:
    (write,) = writes_for([as_steering(model.profile, Add(AT, V), positions=positions)], 5)
    assert write.where.positions == chosen


def test_positions_that_are_never_reached(model: InterpModel) -> None:
    with pytest.raises(RequestError, match="beyond this prompt of 5"):
        writes_for([as_steering(model.profile, Add(AT, V), positions=[5], generated=False)], 5)
    with pytest.raises(RequestError, match="position"):
        writes_for([as_steering(model.profile, Add(AT, V), positions=[-1])], 5)
    with pytest.raises(RequestError, match="position"):
        writes_for([as_steering(model.profile, Add(AT, V), positions=True)], 5)


def test_replace_has_one_row_for_each_written_position(model: InterpModel) -> None:
    three = Replace(AT, torch.ones(3, 8))
    writes_for([as_steering(model.profile, three)], 3)
    writes_for([as_steering(model.profile, three, positions=[0, 2, 3])], 5)
    with pytest.raises(RequestError, match="3 rows for 5 written positions"):
        writes_for([as_steering(model.profile, three)], 5)
    with pytest.raises(RequestError, match="3 rows for 1 written positions"):
        writes_for([as_steering(model.profile, three, positions="last")], 5)


@pytest.mark.parametrize("positions", [None, frozenset({0, 3, 4, 6})])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("generated", [True, False])
@pytest.mark.parametrize("cuts", [(7,), (4, 3), (1,) * 7, (5, 2), (2, 4, 1)])
def test_rows_are_the_same_however_a_sequence_is_cut(
    positions: frozenset[int] | None, prompt: bool, generated: bool, cuts: tuple[int, ...]
) -> None:
    where, prompt_length, length = Where(positions=positions, prompt=prompt, generated=generated), 4, 7
    wanted = [
        p
        for p in range(length)
        if (positions is None or p in positions) and (prompt if p < prompt_length else generated)
    ]
    found, start = [], 0
    for cut in cuts:
        rows = where.rows(start, cut, prompt_length)
        listed = range(*rows.indices(cut)) if isinstance(rows, slice) else rows
        found += [start + row for row in listed]
        start += cut
    assert found == wanted
