"""One architecture: make its tiny checkpoint, ask for its profile, load it, and hold every point to its identities.

Beside ``model.verify()``: every refused address refuses with a reason before a weight is loaded; zero writes at all
writable points change no bit; a large write after a block changes the logits from its position on, and not before;
what the blocks take and give is bit for bit what a bare hook sees; the last residual decodes to the model's logits.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import define, field

from interp_core import (
    Add,
    CapabilityUnsupported,
    InterpError,
    InterpModel,
    ModelUnavailable,
    RequestError,
    inspect_model,
    load_model,
)
from interp_core.address import Address
from interp_core.captures import layers_of, parts_of
from interp_core.checks import difference
from interp_core.verdicts import Verification
from zoo.batches import batch_misfit
from zoo.build import build
from zoo.families import UNBUILDABLE
from zoo.outcome import ABSENT, FAILED, PROVEN, UNCHECKED, UNSERVED, Outcome
from zoo.rules import PROMPT

__all__ = ["prove"]

_TIGHT = 2e-5
_BATCHED = 2e-4  # batches multiply matrices of other shapes, and every step rounds
_WRITTEN = 6
_STEERED = [_WRITTEN]


@define
class _Record:
    """What is found out, until it becomes an outcome."""

    name: str
    kind: str = ""
    marks: dict[str, str] = field(factory=dict)
    reasons: dict[str, list[str]] = field(factory=dict)
    problems: list[str] = field(factory=list)
    doubts: list[str] = field(factory=list)

    def problem(self, text: str) -> None:
        self.problems.append(text)

    def doubt(self, text: str) -> None:
        self.doubts.append(text)

    def mark(self, address: Address, letter: str) -> None:
        at = address.layer or 0
        old = self.marks[address.name]
        self.marks[address.name] = old[:at] + letter + old[at + 1 :]

    def outcome(self) -> Outcome:
        marks = {point: letters[0] if len(set(letters)) == 1 else letters for point, letters in self.marks.items()}
        return Outcome(
            name=self.name,
            kind=self.kind,
            marks=marks,
            reasons=self.reasons,
            problems=tuple(self.problems),
            doubts=tuple(self.doubts),
        )

    def whole(self, kind: str, reason: str) -> None:
        """There is one thing to say, and nothing of single points."""
        self.kind, self.marks, self.reasons = kind, {}, {reason.rstrip("."): ["every point"]}


def prove(name: str, backend: str = "eager") -> Outcome:
    """The outcome for the architecture ``name``. Nothing is raised: what goes wrong is in the outcome."""
    record = _Record(name)
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        path = Path(folder) / "checkpoint"
        try:
            built = build(name)
            built.save_pretrained(path)
        except Exception as error:  # noqa: BLE001 - whatever transformers raises is the reason.
            return _not_built(record, error)
        if name in UNBUILDABLE:
            record.problem("it is listed as one that cannot be built, and builds")
        try:
            reason = _no_forward(built)
            if reason:
                record.doubt(f"transformers does not run it on ids alone: {reason}")
                _expect_refusal(record, path, backend)
            else:
                _prove(record, path, backend)
        except Exception as error:  # noqa: BLE001 - the run goes on, and this is its result for this architecture.
            record.kind = "error"
            record.problem("".join(traceback.format_exception(error, limit=-4, chain=False)))
    return record.outcome()


def _not_built(record: _Record, error: Exception) -> Outcome:
    reason = UNBUILDABLE.get(record.name)
    if reason is None:
        reason = _first_line(error)
        record.problem(f"cannot be built, and is not listed as such: {reason}")
    record.whole("not built", reason)
    return record.outcome()


def _no_forward(built: Any) -> str:
    """Why transformers itself does not run the model on ids alone; empty if it does."""
    try:
        with torch.no_grad():
            built(input_ids=torch.tensor([PROMPT]), use_cache=False)
    except Exception as error:  # noqa: BLE001 - whatever it raises is the reason.
        return _first_line(error)
    return ""


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _expect_refusal(record: _Record, path: Path, backend: str) -> None:
    """A model that does not run on ids alone has to be refused, by one of our errors."""
    try:
        with load_model(path, backend, dtype="float32") as model:
            model.run_with_cache(list(PROMPT), ["lm_head"])
    except CapabilityUnsupported as error:
        record.whole("refused", error.why)
    except InterpError as error:
        record.whole("refused", str(error).replace(str(path), "this checkpoint"))
    else:
        record.kind = "error"
        record.problem("transformers does not run it on ids alone, and a capture does")


def _prove(record: _Record, path: Path, backend: str) -> None:
    try:
        profile = inspect_model(path, backend)
    except ModelUnavailable as error:
        record.whole("refused", str(error).replace(str(path), "this checkpoint"))
        if error.__cause__ is not None:
            record.kind = "error"
            record.problem(f"transformers runs it, and its profile cannot be had: {error}")
        return
    served = _survey(record, profile)
    with load_model(path, backend, dtype="float32") as model:
        _check_refusals(record, model, served)
        if not profile.facts.structure_known:
            record.whole("unknown", f"the block structure of {profile.facts.model_type!r} is not known")
            return
        _judge(record, model.verify(list(PROMPT)))
        for check in (_check_blocks, _check_zero_writes, _check_large_writes, _check_logits, _check_batches):
            check(record, model, served)
    letters = set("".join(record.marks.values()))
    failed = FAILED in letters or record.problems
    record.kind = "failed" if failed else "not proven" if UNCHECKED in letters else "proven"


def _survey(record: _Record, profile: Any) -> list[Address]:
    """Marks and reasons from the profile alone, and the addresses that are served."""
    served = []
    for spec in profile.points():
        layers = layers_of(spec, profile)
        why: dict[str, list[int | None]] = {}
        for layer in layers:
            parts = parts_of(profile, spec, layer)
            served += parts
            refusal = None if parts else profile.read_refusal(Address(spec.name, layer))
            lacks = None in spec.absent or layer in spec.absent
            letter = UNCHECKED if parts else ABSENT if lacks else UNSERVED
            record.marks[spec.name] = record.marks.get(spec.name, "") + letter
            if refusal is not None:
                why.setdefault(refusal.why.rstrip("."), []).append(layer)
        for reason, where in why.items():
            label = spec.name if len(where) == len(layers) else f"{spec.name} ({' '.join(map(str, where))})"
            record.reasons.setdefault(reason, []).append(label)
    return served


def _check_refusals(record: _Record, model: InterpModel, served: list[Address]) -> None:
    """Every address that the profile refuses is refused by a capture too, before there are weights."""
    there = {(address.name, address.layer) for address in served}
    for spec in model.points():
        for layer in layers_of(spec, model.profile):
            if (spec.name, layer) in there:
                continue
            address = Address(spec.name, layer)
            try:
                model.run_with_cache(list(PROMPT), [address])
            except CapabilityUnsupported as error:
                if not (error.why.strip() and error.instead.strip()):
                    record.problem(f"{address}: its refusal gives no reason, or no way forward")
            else:
                record.problem(f"{address}: the profile refuses it, and a capture does not")
    if model.session.warm:
        record.problem("refusals loaded the weights")


def _judge(record: _Record, verification: Verification) -> None:
    letters = {"proven": PROVEN, "failed": FAILED}
    for name, verdicts in verification.layers.items():
        for layer, verdict in verdicts.items():
            if verdict.state in letters:
                record.mark(Address(name, layer), letters[verdict.state])
            elif verdict.state == "unchecked":
                record.doubt(f"{Address(name, layer)}: {verdict.reason}")
    for check in verification.failed():
        record.problem(f"{check.describe()}; it speaks of {', '.join((*check.proves, *check.concerns))}")
    record.doubts += verification.hints


@contextmanager
def _bare_hooks(model: InterpModel) -> Iterator[dict[str, Any]]:
    """What plain hooks of torch see at the ends of the blocks."""
    backend: Any = model.session.backend()
    seen: dict[str, Any] = {}
    handles = []

    def keep(key: str) -> Any:
        def hook(_module: Any, args: Any, kwargs: Any, *output: Any) -> None:
            value = output[0] if output else args[0] if args else kwargs["hidden_states"]
            seen[key] = (value if torch.is_tensor(value) else value[0]).clone()

        return hook

    for layer in range(model.n_layers):
        block = backend.layout.module("block", layer)
        if backend.layout.has("block_in", layer):
            # The residual begins behind a norm inside this block.
            norm = backend.layout.module("block_in", layer)
            handles.append(norm.register_forward_hook(keep(f"resid_pre.{layer}"), with_kwargs=True))
        else:
            handles.append(block.register_forward_pre_hook(keep(f"resid_pre.{layer}"), with_kwargs=True))
        handles.append(block.register_forward_hook(keep(f"resid_post.{layer}"), with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _check_blocks(record: _Record, model: InterpModel, served: list[Address]) -> None:
    ends = [a for a in served if a.name in ("resid_pre", "resid_post") and not a.coordinates]
    if not ends:
        return
    with _bare_hooks(model) as seen:
        cache = model.run_with_cache(list(PROMPT), ends)
    for address in ends:
        found, bare = cache[address], seen.get(str(address))
        if bare is None or not torch.equal(found.flatten(), bare.flatten()):
            record.mark(address, FAILED)
            record.problem(f"{address}: not what a bare hook on the block sees")


def _writable(model: InterpModel, served: list[Address]) -> list[Address]:
    return [a for a in served if model.refusal(a, write=True) is None]


def _ends(model: InterpModel, served: list[Address]) -> list[Address]:
    last = model.facts.last_layer
    wanted = (Address("lm_head"), Address("resid_post", last), Address("resid_streams", last))
    return [address for address in wanted if address in served]


def _check_zero_writes(record: _Record, model: InterpModel, served: list[Address]) -> None:
    ends, addresses = _ends(model, served), _writable(model, served)
    plain = model.run_with_cache(list(PROMPT), ends)

    def same(some: list[Address]) -> bool:
        zeros = [Add(a, torch.zeros(model.profile.shape(a))) for a in some]
        written = model.run_with_cache(list(PROMPT), ends, steering=zeros)
        return all(torch.equal(written[end], plain[end]) for end in ends)

    shaped = [a for a in addresses if 0 not in model.profile.shape(a)]
    if same(shaped):
        return
    for address in shaped:
        if not same([address]):
            record.mark(address, FAILED)
            record.problem(f"{address}: a zero write changes bits")


def _check_large_writes(record: _Record, model: InterpModel, served: list[Address]) -> None:
    ends = _ends(model, served)[:1]
    if not ends:
        return
    plain = model.run_with_cache(list(PROMPT), ends)[ends[0]][0]
    name = "resid_streams" if model.facts.n_streams > 1 else "resid_post"
    for address in [a for a in _writable(model, served) if a.name == name]:
        vector = torch.linspace(-3.0, 5.0, torch.Size(model.profile.shape(address)).numel())
        with model.steer(Add(address, vector), positions=_STEERED):
            changed = model.run_with_cache(list(PROMPT), ends)[ends[0]][0]
        if difference(changed[_WRITTEN], plain[_WRITTEN]) < 1e-3:
            record.mark(address, FAILED)
            record.problem(f"{address}: a large write leaves {ends[0]} as it was")
        causal = all(layer.causal for layer in model.facts.layers)
        if causal and difference(changed[:_WRITTEN], plain[:_WRITTEN]) > _TIGHT:
            record.mark(address, FAILED)
            record.problem(f"{address}: a large write at position {_WRITTEN} changes {ends[0]} before it")


def _check_logits(record: _Record, model: InterpModel, served: list[Address]) -> None:
    last = Address("resid_post", model.facts.last_layer)
    if last not in served or model.refusal("logit_lens") is not None:
        return
    backend: Any = model.session.backend()
    with torch.no_grad():
        logits = backend.model(input_ids=torch.tensor([PROMPT]), use_cache=False).logits[0]
    error = difference(model.decode_residuals(model.run_with_cache(list(PROMPT), [last])[last][0]), logits)
    if error > _TIGHT:
        record.mark(last, FAILED)
        record.problem(f"decode_residuals({last}) is not the model's logits: error {error:.1e}")


def _check_batches(record: _Record, model: InterpModel, served: list[Address]) -> None:
    try:
        error = batch_misfit(model, _ends(model, served))
    except RequestError as refused:
        # Families without a key/value cache, or with one of their own kind, do not generate here, and say so.
        (record.doubt if "cache" in str(refused) else record.problem)(f"generation: {refused}")
        return
    if error > _BATCHED:
        record.problem(f"a batch of unequal prompts does not generate what each does alone: error {error:.1e}")
