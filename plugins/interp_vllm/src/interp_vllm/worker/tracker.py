"""The worker's book of requests: who is in the step, what each wants, and what has come of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from interp_core.address import Address
from interp_core.expressions import Read, leaves
from interp_core.profile import ModelProfile
from interp_core.requests import Write
from interp_core.selection import axes_of
from interp_vllm.trunk import own_trunk
from interp_vllm.wire import EXTRA_ARG, WorkerRequest, decode_request
from interp_vllm.worker.bindings import Tree
from interp_vllm.worker.derived import Derived
from interp_vllm.worker.rows import PositionedRows, Span
from interp_vllm.worker.shards import Shard, shard_of
from interp_vllm.worker.sites import Sites
from interp_vllm.worker.state import AttentionRows, ReadJob, RequestState, SiteKey, Work, WriteJob
from interp_vllm.worker.static import StaticTaps
from interp_vllm.worker.sums import lives_here

__all__ = ["Tracker"]

_MOST_STATES: Final = 2048
"""Requests held before those that are over and that nobody fetched are dropped, the oldest first."""

_MOST_PLAIN: Final = 4096
"""Ids of requests that want nothing, remembered before they are looked at again."""


class Tracker:
    """One per worker. ``names`` is the adapter of this vLLM."""

    def __init__(self, worker: Any, profile: ModelProfile, names: Any) -> None:
        self.worker, self.profile, self.names = worker, profile, names
        self.rank, self.size = names.tensor_parallel()
        trunk = own_trunk(profile.architecture, profile.backend)
        self.tree = Tree(names.model_of(worker), profile.facts, names, trunk)
        self.states: dict[str, RequestState] = {}
        self.sites = Sites(self.states, self.key_of, self.tree.place)
        self.derived = Derived(self.tree, profile, names, self.size)
        self.static = self._static_taps() if profile.spec.static is not None else None
        self.hooked = False
        self.counts = {"steps": 0, "restarts": 0}
        self._plain: set[str] = set()
        self._unfetched: set[str] = set()

    # A step.

    def around(self, forward: Callable[[], Any], tokens: int) -> Any:
        """Run a step's forward with its rows known."""
        if self._unfetched or len(self.states) > _MOST_STATES:
            self._forget()
        spans = [Span(*row) for row in self.names.step_rows(self.worker) if self._serves(row[0])]
        if not spans:
            return forward()
        self.counts["steps"] += 1
        try:
            return (
                self._step(spans, forward, tokens) if self.static is None else self._static_step(spans, forward, tokens)
            )
        finally:
            for span in spans:
                self._passed(self.states[span.request], span)

    def _step(self, spans: list[Span], forward: Callable[[], Any], tokens: int) -> Any:
        self.sites.spans, self.sites.tokens = spans, tokens
        try:
            return forward()
        finally:
            self.sites.spans = []

    def _static_step(self, spans: list[Span], forward: Callable[[], Any], tokens: int) -> Any:
        assert self.static is not None
        if self.hooked:
            return self._step(spans, forward, tokens)
        self.static.fill(spans, self.states)
        try:
            out = forward()
            self.static.harvest(spans, self.states)
        finally:
            self.static.clear()
        return out

    def run_hooked(self, hooked: bool) -> None:
        """Serve a compiled model's requests by Python forwards and hooks, for the proof of its taps."""
        self.hooked = hooked
        self.names.run_python(self.tree.model, hooked)

    def _static_taps(self) -> StaticTaps:
        where = self.names.forward_terms(self.worker)
        return StaticTaps(self.tree, self.profile, **where)

    def _forget(self) -> None:
        over = [r for r in self.states if not self.names.knows(self.worker, r)]
        left = over[: max(0, len(self.states) - _MOST_STATES)]
        for request in {*left, *(r for r in over if r in self._unfetched)}:
            self._unfetched.discard(request)
            self.drop(request)

    def _passed(self, state: RequestState, span: Span) -> None:
        # A request that begins again was preempted: its rows come a second time.
        self.counts["restarts"] += span.position < state.seen
        state.seen = max(state.seen, span.position + span.length)

    def _serves(self, request: str) -> bool:
        if request in self.states:
            return True
        if request in self._plain:
            return False
        extra = self.names.extra_args(self.worker, request)
        if not extra or EXTRA_ARG not in extra:
            if len(self._plain) > _MOST_PLAIN:
                self._plain.clear()
            self._plain.add(request)
            return False
        self._begin(request, extra[EXTRA_ARG])
        return True

    def _begin(self, request: str, data: object) -> None:
        state = self.states[request] = RequestState(WorkerRequest(request, 0, (), ()))
        try:
            state.request = decode_request(data)
            if not state.request.fetched:
                self._unfetched.add(request)
            if self.static is None or self.hooked:
                self._place(state)
            else:
                self._place_static(state)
        except Exception as error:  # noqa: BLE001  Whatever a forged request is, the step of the others goes on.
            state.error = f"{type(error).__name__}: {error}"
            state.work.clear()
            if not state.request.prompt_length:
                self._unfetched.add(request)  # Not even its name could be read, so nobody can ask for it.
            return
        for key, work in state.work.items():
            module, shard = self._module_at(key, work.layer)
            self.sites.use(key, module, shard, request)

    # What a request wants, at which sites.

    def key_of(self, leaf: Read, layer: int | None) -> SiteKey:
        """The site of a leaf."""
        return id(self.tree.layout.module(leaf.role, self._level(leaf.role, layer))), leaf.side

    def _level(self, role: str, layer: int | None) -> int | None:
        return None if role in self.tree.layout.trunk else layer

    def _place(self, state: RequestState) -> None:
        for read in state.request.reads:
            address = self.profile.address(read.address)
            refused = self.profile.read_refusal(address)
            if refused is not None:
                raise refused
            if self.tree.holds(address):
                self._place_read(state, address, read.positions)
        for write in state.request.writes:
            address = self.profile.address(write.address)
            refused = self.profile.write_refusal(address)
            if refused is not None:
                raise refused
            if self.tree.holds(address):
                self._place_write(state, write, address)

    def _place_static(self, state: RequestState) -> None:
        assert self.static is not None
        for read in state.request.reads:
            address = self.profile.address(read.address)
            refused = self.profile.read_refusal(address)
            if refused is not None:
                raise refused
            state.stores[address] = PositionedRows(read.positions)
        for write in state.request.writes:
            refused = self.profile.write_refusal(self.profile.address(write.address))
            if refused is not None:
                raise refused
        self.static.place(state)

    def _place_read(self, state: RequestState, address: Address, positions: tuple[int, ...] | None) -> None:
        layer = address.layer
        if address.name in ("attn_scores", "attn_probs"):
            assert layer is not None
            if layer not in state.attention:
                state.attention[layer] = AttentionRows(*self._attention_shards(layer))
                leaf = Read("attn.kernel", "call")
                self._work(state, leaf, layer).attention = state.attention[layer]
            state.stores[address] = PositionedRows(positions)
            return
        source, axes, coordinates = self.derived.source(address), (), ()
        if source == address:
            axes, coordinates = axes_of(self.profile, address)  # type: ignore[assignment]
        expression = self.tree.bind(source.bare()).read
        store = state.stores[address] = PositionedRows(positions)
        work = self._work(state, self._last(state, expression, source.layer), source.layer)
        work.reads.append(ReadJob(address, expression, axes, coordinates, store))

    def _place_write(self, state: RequestState, write: Write, address: Address) -> None:
        point = address.bare()
        axes, coordinates = axes_of(self.profile, address)
        expression = self.tree.bind(point).writes_through
        work = self._work(state, self._last(state, expression, address.layer), address.layer)
        jobs = work.direct if lives_here(expression) else work.carried
        same = next((job for job in jobs if job.expression == expression and job.axes == axes), None)
        if same is None:
            jobs.append(same := WriteJob(expression, axes, []))
        same.items.append((write, coordinates))

    def _last(self, state: RequestState, expression: Any, layer: int | None) -> Read:
        *earlier, last = leaves(expression)
        for leaf in earlier:
            if self.key_of(leaf, layer) != self.key_of(last, layer):
                kept = self._work(state, leaf, layer).kept
                if leaf not in kept:
                    kept.append(leaf)
        return last

    def _work(self, state: RequestState, leaf: Read, layer: int | None) -> Work:
        return state.work.setdefault(self.key_of(leaf, layer), Work(self._level(leaf.role, layer)))

    def _module_at(self, key: SiteKey, layer: int | None) -> tuple[Any, Shard | None]:
        layout = self.tree.layout
        roles = layout.trunk if layer is None else layout.blocks[layer]
        role, module = next((role, module) for role, module in roles.items() if id(module) == key[0])
        facts = None if layer is None else self.profile.facts.layers[layer]
        kind = self.names.linear_kind(module)
        return module, shard_of(role, key[1], module, kind, facts, self.rank, self.size, self.names.all_gather)

    def _attention_shards(self, layer: int) -> tuple[Shard | None, Shard | None]:
        facts = self.profile.facts.layers[layer]
        kernel = self.tree.layout.module("attn.kernel", layer)
        return tuple(  # type: ignore[return-value]
            shard_of(role, "input", kernel, "", facts, self.rank, self.size, self.names.all_gather)
            for role in ("attn.q_norm", "attn.k_norm")
        )

    # What came of it.

    def collect(self, requests: Sequence[str]) -> dict[str, dict[Address, Tensor] | str]:
        """Rows of requests by the name they gave themselves, or why there are none; they are forgotten here.

        Every rank has to call it with the same names in the same order: parts of tensors are exchanged.
        """
        found: dict[str, dict[Address, Tensor] | str] = {}
        for name in requests:
            internal = next((key for key, state in self.states.items() if state.request.name == name), None)
            if internal is None:
                found[name] = "it never reached a forward"
                continue
            state = self.drop(internal)
            found[name] = state.error if state.error is not None else self._rows(state)
        return found

    def drop(self, internal: str) -> RequestState:
        """Forget a request: its rows, and the hooks that only it needed."""
        state = self.states.pop(internal)
        self.sites.leave(state.work, internal)
        if self.static is not None:
            self.static.forget(state)
        return state

    def drop_named(self, names: Sequence[str]) -> None:
        """Forget requests by the name they gave themselves."""
        wanted = set(names)
        for internal in [key for key, state in self.states.items() if state.request.name in wanted]:
            self.drop(internal)

    def _rows(self, state: RequestState) -> dict[Address, Tensor] | str:
        try:
            with self.names.no_gradients():
                return {a: self._assembled(state, a, store) for a, store in state.stores.items()}
        except Exception as error:  # noqa: BLE001  What cannot be computed of one request is that request's error.
            return f"{type(error).__name__}: {error}"

    def _assembled(self, state: RequestState, address: Address, store: PositionedRows) -> Tensor:
        if address.name in ("attn_scores", "attn_probs"):
            assert address.layer is not None
            rows = state.attention[address.layer]
            query, key = (part.assembled(state.seen, str(address)) for part in (rows.queries, rows.keys))
            order = range(state.seen) if store.wanted is None else store.wanted
            positions = torch.tensor(list(order), dtype=torch.long, device=query.device)
            return self.derived.attention(address, query[positions], key, positions)
        if store.wanted == ():
            return torch.empty(0, *self.profile.shape(address), dtype=self.names.forward_terms(self.worker)["dtype"])
        rows_of_source = store.assembled(state.seen, str(address))
        return self.derived.value(address, rows_of_source)

    def summary(self) -> dict[str, int]:
        """How much is held: for tests, and for whoever watches memory."""
        held = sum(state.nbytes for state in self.states.values())
        return {"requests": len(self.states), "sites": len(self.sites), "bytes": held, **self.counts}
