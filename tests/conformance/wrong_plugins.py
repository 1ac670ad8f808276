"""Backends and architectures that are wrong on purpose, one per rule of the behaviour half, and right ones beside them.

A wrong backend is the eager one with one mistake in it, as an author of another backend may make it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from attrs import evolve
from torch import Tensor

from interp_core import (
    Architecture,
    BackendSpec,
    Cache,
    Capability,
    Claim,
    ModelFacts,
    ModelProfile,
    PluginHost,
    PointSpec,
    PointSupport,
)
from interp_core.address import Address
from interp_core.backend import Availability, StaticSets
from interp_core.expressions import Binding, Read
from interp_core.hookspecs import hookimpl
from interp_core.layout import Layout
from interp_core.points import hook, unsupported
from interp_core.requests import ForwardRequest, ForwardResult, GenerationRun, Step, Where
from interp_core.testing import Check, difference
from interp_core.trunk import Trunk
from interp_eager.backend import EagerBackend
from interp_eager.plugin import CAPABILITIES, OPTIONS, POINTS, grad_support, probe

__all__ = ["ARCHITECTURES", "BACKENDS", "backend", "few_places", "gate_identity", "host_of", "with_gate"]

Rows = dict[Address, Tensor]


def host_of(*records: Any) -> PluginHost:
    """A host with one plugin of these records."""
    plugin = ModuleType("made_up")
    backends = [record for record in records if isinstance(record, BackendSpec)]
    architectures = [record for record in records if isinstance(record, Architecture)]
    plugin.interp_backends = hookimpl(lambda: backends)  # type: ignore[attr-defined]
    plugin.interp_architectures = hookimpl(lambda: architectures)  # type: ignore[attr-defined]
    plugin.interp_capabilities = hookimpl(lambda: [r for r in records if isinstance(r, Capability)])  # type: ignore[attr-defined]
    return PluginHost(discover=False, plugins=[("made-up", plugin)], environ={"INTERP_STRICT_PLUGINS": "1"})


def backend(factory: str = "interp_eager.backend:EagerBackend", **changes: Any) -> BackendSpec:
    """A description of the eager backend by another name, changed."""
    factory = factory if ":" in factory else f"wrong_plugins:{factory}"
    values: dict[str, Any] = {"summary": "A backend.", "factory": factory, "probe": probe, "points": POINTS}
    values |= {"capabilities": CAPABILITIES, "options": OPTIONS, "grad": grad_support}
    return BackendSpec(name="mine", **{**values, **changes})


# Backends that answer questions wrongly.


def limits_without_a_word(facts: ModelFacts, options: Mapping[str, Any]) -> dict[str, PointSupport]:
    return {"z": unsupported("")}


def weighs_the_checkpoint(facts: ModelFacts, options: Mapping[str, Any]) -> StaticSets:
    """Sets whose memory is reckoned from the weights: a question before ``warmup()`` has none."""
    return StaticSets(points=["resid_post.*"], memory=size_of_the_weights)


def few_places(facts: ModelFacts, options: Mapping[str, Any]) -> StaticSets:
    """Sets that a backend may declare rightly."""
    return StaticSets(points=["resid_post.*", "attn_out.*", "embeddings"], writes=["resid_post.0"])


def size_of_the_weights(profile: ModelProfile) -> int:
    return (Path(profile.model_id) / "model.safetensors").stat().st_size


# Backends that run wrongly.


class Changed(EagerBackend):
    """Rows as :meth:`change` makes them of the right ones."""

    def run(self, requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
        results = super().run(requests)
        return [
            ForwardResult(rows={a: self.change(a, rows, request) for a, rows in result.rows.items()})
            for request, result in zip(requests, results, strict=True)
        ]

    def change(self, address: Address, rows: Tensor, request: ForwardRequest) -> Tensor:
        return rows


class FlattensHeads(Changed):
    def change(self, address: Address, rows: Tensor, request: ForwardRequest) -> Tensor:
        return rows.flatten(1) if address.name == "z" else rows


class ForgetsTheMultiplier(Changed):
    def change(self, address: Address, rows: Tensor, request: ForwardRequest) -> Tensor:
        return rows * 2.0 if address.name == "attn_out_post" else rows


class ReadsBeforeTheNorm(EagerBackend):
    """``attn_in`` is what the norm reads, and is written there too: consistent, and wrong."""

    def _bind(self, address: Address) -> Binding:
        return super()._bind(Address("resid_pre", address.layer) if address.name == "attn_in" else address)


class SwapsTheBranches(EagerBackend):
    def _bind(self, address: Address) -> Binding:
        other = {"mlp_pre": "mlp_pre_linear", "mlp_pre_linear": "mlp_pre"}.get(address.name, address.name)
        return super()._bind(Address(other, address.layer))


class CountsLayersFromOne(EagerBackend):
    """Sublayer inputs come from the neighbour block, whose shapes are the same."""

    def run(self, requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
        def moved(address: Address) -> Address:
            if address.name != "mlp_in" or address.layer is None:
                return address
            return Address(address.name, (address.layer + 1) % self.profile.facts.n_layers, address.coordinates)

        asked = [evolve(r, reads=tuple(evolve(x, address=moved(x.address)) for x in r.reads)) for r in requests]
        back = {moved(read.address): read.address for request in requests for read in request.reads}
        return [ForwardResult(rows={back[a]: t for a, t in found.rows.items()}) for found in super().run(asked)]


class ReadsTheFirstHead(EagerBackend):
    def run(self, requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
        def first(address: Address) -> Address:
            return Address(address.name, address.layer, tuple((name, 0) for name, _ in address.coordinates))

        asked = [evolve(r, reads=tuple(evolve(x, address=first(x.address)) for x in r.reads)) for r in requests]
        found = super().run(asked)
        return [
            ForwardResult(rows={read.address: result.rows[first(read.address)] for read in request.reads})
            for request, result in zip(requests, found, strict=True)
        ]


class PadsWithoutAMask(EagerBackend):
    def padded(self, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
        inputs = super().padded(rows)
        # On the left, and nobody told.
        width = inputs["input_ids"].shape[1]
        for row, ids in zip(inputs["input_ids"], rows, strict=True):
            row.copy_(row.roll(width - len(ids)))
        return inputs


class Remembers(EagerBackend):
    """Keeps results by request, and hands out the very tensors that it keeps."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.kept: dict[Any, ForwardResult] = {}

    def run(self, requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
        found = []
        for request in requests:
            key = (request.token_ids, request.reads, tuple(map(id, request.writes)))
            if key not in self.kept or request.writes:
                self.kept[key] = super().run([request])[0]
            found.append(self.kept[key])
        return found


class TouchesWhatItWrites(Changed):
    """A detour through half precision wherever something is written."""

    def change(self, address: Address, rows: Tensor, request: ForwardRequest) -> Tensor:
        return rows.bfloat16().float() if request.writes and rows.is_floating_point() else rows


class WritesEverywhere(EagerBackend):
    def run(self, requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
        return super().run([evolve(r, writes=tuple(evolve(w, where=Where()) for w in r.writes)) for r in requests])


class IgnoresWrites(EagerBackend):
    def run(self, requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
        return super().run([evolve(request, writes=()) for request in requests])


class SteersTheBatch(EagerBackend):
    def run(self, requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
        everything = tuple(write for request in requests for write in request.writes)
        return super().run([evolve(request, writes=everything) for request in requests])


class HasNoUnembedding(EagerBackend):
    def unembed(self, rows: Any, *, raw: bool) -> Tensor:
        if raw:
            raise NotImplementedError("not yet")
        return super().unembed(rows, raw=raw)


class Run:
    """A generation, in somebody else's hands."""

    def __init__(self, run: GenerationRun) -> None:
        self.run = run

    @property
    def finish_reason(self) -> str | None:
        return self.run.finish_reason

    def __iter__(self) -> Run:
        return self

    def __next__(self) -> Step:
        return next(self.run)

    def result(self) -> ForwardResult:
        return self.run.result()

    def close(self) -> None:
        self.run.close()


class SecondBest(Run):
    def __next__(self) -> Step:
        step = super().__next__()
        return evolve(step, token_id=(step.token_id + 1) % 300)


class LosesTheLastRow(Run):
    def result(self) -> ForwardResult:
        return ForwardResult(rows={a: rows[:-1] for a, rows in super().result().rows.items()})


class GeneratesTheSecondBest(EagerBackend):
    def generate_together(self, requests: Sequence[ForwardRequest]) -> Any:
        return [{i: SecondBest(run) for i, run in batch.items()} for batch in super().generate_together(requests)]


class GeneratesOneRowTooFew(EagerBackend):
    def generate_together(self, requests: Sequence[ForwardRequest]) -> Any:
        return [{i: LosesTheLastRow(run) for i, run in batch.items()} for batch in super().generate_together(requests)]


class Drifts(Changed):
    """Every run is a little off the one before."""

    runs = 0

    def change(self, address: Address, rows: Tensor, request: ForwardRequest) -> Tensor:
        self.runs += 1
        return rows + 1e-4 * self.runs


class LeavesAHook(EagerBackend):
    def run(self, requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
        handle = self.layout.module("block", 0).register_forward_hook(lambda *_: None)
        found = super().run(requests)
        handle.remove()
        return found


class SharesOneDesk(EagerBackend):
    """Takes callers of several threads, and keeps what it is asked in one place."""

    def run(self, requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
        self.desk = requests
        time.sleep(0.05)
        return super().run(self.desk)


class RaisesAtTheEnd(EagerBackend):
    def shutdown(self) -> None:
        raise RuntimeError("the engine does not answer")


# Architectures.

GATE = PointSpec(
    name="mlp_gate", scope="layer", axes=["d_mlp"], definition="The gate of the MLP, behind its activation function."
)


class WithGate(Trunk):
    """The trunk of a Llama, with one point more: ``mlp_gate``."""

    def layout(self, model: Any, facts: ModelFacts) -> Layout:
        found = super().layout(model, facts)
        for parts in found.blocks:
            parts["mlp.act_fn"] = parts["mlp"].act_fn
        return found

    def bind(self, address: Address, facts: ModelFacts, layout: Layout) -> Binding:
        return Binding(Read("mlp.act_fn")) if address.name == "mlp_gate" else super().bind(address, facts, layout)


BINDINGS = WithGate()


def with_gate(**changes: Any) -> Architecture:
    """A Llama with one point more, described rightly, changed."""
    values = {
        "name": "gated-llama",
        "summary": "A Llama whose gates can be read.",
        "claim": Claim(model_types={"llama"}),
        "points": [GATE],
        "support": {"mine": {"mlp_gate": hook()}},
        "bindings": {"mine": "wrong_plugins:BINDINGS"},
    }
    return Architecture(**{**values, **changes})


def one_id_too_many(config: Any, facts: ModelFacts) -> ModelFacts:
    return evolve(facts, vocab_size=facts.vocab_size + 1)


def gate_identity(_suite: Any, cache: Cache) -> Iterable[Check]:
    """``mlp_gate * mlp_pre_linear`` is ``mlp_act``."""
    for layer in (0, 1):
        gate, linear, act = (cache[f"{name}.{layer}"][0] for name in ("mlp_gate", "mlp_pre_linear", "mlp_act"))
        yield Check(
            identity="mlp_gate times mlp_pre_linear is mlp_act",
            layer=layer,
            proves=("mlp_gate",),
            error=difference(gate * linear, act),
            control=difference(gate, act),
            tolerance=2e-5,
        )


BACKENDS: dict[str, list[tuple[Callable[[], BackendSpec], str]]] = {
    "profile_answers_without_weights": [(lambda: backend(static=weighs_the_checkpoint), "there is no profile")],
    "every_no_has_a_reason": [(lambda: backend(limits=limits_without_a_word), "'z' is not served on this model")],
    "undeclared_is_refused_before_work": [
        (
            lambda: backend(capabilities=CAPABILITIES - {"attention"}, lacks={"attention": " "}),
            "'attention' is refused without a reason",
        )
    ],
    "profile_and_refusals_pickle": [
        (lambda: backend(probe=partial(lambda found: found, Availability(True))), "cannot be pickled")
    ],
    "declared_points_have_the_declared_shape": [(lambda: backend("FlattensHeads"), "z.0 is [12, 128]")],
    "every_point_is_proven": [
        (lambda: backend("ForgetsTheMultiplier"), "resid_pre + attn_out_post is resid_mid"),
        (lambda: backend("ReadsBeforeTheNorm"), "resid_pre, normalised and times one gain per channel, is attn_in"),
        (lambda: backend("SwapsTheBranches"), "act(mlp_pre)"),
        (lambda: backend("CountsLayersFromOne"), "resid_mid, normalised and times one gain per channel, is mlp_in"),
    ],
    "parts_equal_the_whole": [(lambda: backend("ReadsTheFirstHead"), "z.0.head-3")],
    "unequal_prompts_equal_one_by_one": [(lambda: backend("PadsWithoutAMask"), "is another in a batch than alone")],
    "results_are_copies": [(lambda: backend("Remembers"), "overwriting results changes")],
    "a_zero_write_changes_nothing": [(lambda: backend("TouchesWhatItWrites"), "adding zero to embeddings changes")],
    "a_large_write_lands_where_it_says": [
        (lambda: backend("WritesEverywhere"), "changes it at other positions"),
        (lambda: backend("IgnoresWrites"), "changes nothing in lm_head"),
    ],
    "steering_stays_in_its_request": [(lambda: backend("SteersTheBatch"), "of the request beside it")],
    "declared_capabilities_work": [(lambda: backend("HasNoUnembedding"), "'raw_logits' is declared, and using it")],
    "generation": [(lambda: backend("GeneratesTheSecondBest"), "is not the most likely one")],
    "capture_while_generating_equals_one_forward": [(lambda: backend("GeneratesOneRowTooFew"), "less one are")],
    "bad_input_is_a_typed_error": [(lambda: backend("Drifts"), "after bad input, a plain run gives another")],
    "nothing_is_left_after_a_failure": [(lambda: backend("LeavesAHook"), "1 hooks are left")],
    "several_threads": [(lambda: backend("SharesOneDesk", concurrent=True), "on a thread beside others")],
    "shutdown": [(lambda: backend("RaisesAtTheEnd"), "raises RuntimeError: the engine does not answer")],
}
"""Per test of the suite, backends that break what it asks, and a piece of what it says of them."""

ARCHITECTURES: dict[str, tuple[Callable[[], Architecture], str]] = {
    "the_vocabulary_is_as_declared": (lambda: with_gate(facts=one_id_too_many), "the last id of the vocabulary, 300"),
    "the_architecture_claims_the_checkpoint": (lambda: with_gate(claim=Claim(model_types={"lama"})), "claimed by"),
}
"""The same for architectures."""
