"""Everything that can be said of a model on a backend before a weight is loaded, in one frozen record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from interp_core.address import Address
from interp_core.architecture import Architecture
from interp_core.backend import BackendSpec
from interp_core.capabilities import Capability
from interp_core.errors import AddressError, CapabilityUnsupported, RequestError, unknown_name
from interp_core.facts import ModelFacts
from interp_core.gradients import GradSupport
from interp_core.points import PointSpec, PointSupport
from interp_core.residual import ResidualBasis
from interp_core.resolution import axis_sizes, resolve_address, resolve_addresses

__all__ = ["ModelProfile"]

_POINT_CAPABILITIES = {"attn_scores": "attention", "attn_probs": "attention"}
_RESIDUALS = ("resid_pre", "resid_mid", "resid_post")


@frozen(kw_only=True)
class ModelProfile:
    """What a model can do on a backend, answered from configuration. Made by ``inspect_model``.

    Attributes:
        model_id: what ``load_model`` was given.
        backend: the backend's name.
        spec: the backend's description.
        facts: what the configuration says.
        architecture: the architecture that a plugin claims for this trunk, or ``None``.
        specs: every point, general ones first, with support per registered backend.
        capabilities: the merged table.
        residual_basis: what the residual stream is.
        grad_support: whether gradients flow.
        static_points: addresses with a declared tap; empty unless the backend compiles its forward.
        static_writes: addresses with a declared write site.
        static_bytes: memory that those take, in bytes; 0 unless the backend compiles its forward.
        options: load options, checked, defaults filled in.
        passed_over: backends that ``auto`` did not choose, each with its reason.
    """

    model_id: str
    spec: BackendSpec
    facts: ModelFacts
    architecture: Architecture | None = None
    specs: Mapping[str, PointSpec] = field(factory=dict)
    capabilities: Mapping[str, Capability] = field(factory=dict)
    residual_basis: ResidualBasis = ResidualBasis()
    grad_support: GradSupport = GradSupport(through_forward=False)
    static_points: tuple[Address, ...] = ()
    static_writes: tuple[Address, ...] = ()
    static_bytes: int = 0
    options: Mapping[str, Any] = field(factory=dict)
    passed_over: Mapping[str, str] = field(factory=dict)

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self.spec.name

    @property
    def architecture_name(self) -> str:
        """The claiming architecture's name, or the trunk's ``model_type``."""
        return self.architecture.name if self.architecture else self.facts.model_type

    def points(self) -> tuple[PointSpec, ...]:
        """Every point: the general ones, then what the trunk adds. ``spec.absent`` says what is not there."""
        return tuple(self.specs.values())

    def address(self, value: object) -> Address:
        """One address that exists on this model (whether it is served is :meth:`refusal`'s answer).

        Raises:
            AddressError: name, layer or coordinate do not exist.
        """
        return resolve_address(value, self.specs, self.facts)

    def addresses(self, values: object) -> tuple[Address, ...]:
        """Addresses of a request: ranges expanded, duplicates dropped.

        Raises:
            AddressError: as :meth:`address`.
        """
        return resolve_addresses(values, self.specs, self.facts)

    def shape(self, address: Address) -> tuple[int, ...]:
        """Sizes of the last axes of ``address``; 0 where they depend on the input."""
        return axis_sizes(address, self.specs[address.name], self.facts)

    def support(self, name: str) -> PointSupport:
        """How far this backend serves the point ``name``."""
        return self.specs[name].support[self.backend]

    def supports(self, what: object) -> bool:
        """Whether a capability (by name) or an address (for reading) is served."""
        return self.refusal(what) is None

    def refusal(self, what: object, *, write: bool = False) -> CapabilityUnsupported | AddressError | None:
        """The error that using ``what`` would raise, or ``None``.

        Args:
            what: a capability's name, or an address.
            write: for an address, whether to ask for writing rather than reading.

        Raises:
            RequestError: ``what`` is neither.
        """
        if isinstance(what, str) and what in self.capabilities:
            return self._capability_refusal(what)
        if isinstance(what, str) and "." not in what and what not in self.specs:
            raise RequestError(unknown_name("capability or point", what, [*self.capabilities, *self.specs]))
        try:
            address = self.address(what)
        except AddressError as error:
            return error
        return self.write_refusal(address) if write else self.read_refusal(address)

    def require(self, capability: str) -> None:
        """Raise the refusal of a capability, if there is one."""
        refused = self._capability_refusal(capability)
        if refused is not None:
            raise refused

    def require_lens(self, *, reduced: bool) -> None:
        """Raise the refusal of the logit lens, if any. ``reduced``: the caller names a reduction of streams."""
        streams = reduced and self.facts.n_streams > 1 and self.architecture is not None
        if not (streams and "logit_lens" in self.spec.capabilities):
            self.require("logit_lens")

    def read_refusal(self, address: Address) -> CapabilityUnsupported | None:
        """The error that reading ``address`` would raise, or ``None``."""
        refused = self._common_refusal("capture", address)
        if refused is not None or address.module_path is not None:
            return refused
        support = self.support(address.name)
        if not support.readable:
            return self._refuse(_POINT_CAPABILITIES.get(address.name, "read_point"), support.why, address)
        if self.spec.static is not None and address.bare() not in self.static_points:
            return self._undeclared(address, "static_points")
        return None

    def write_refusal(self, address: Address) -> CapabilityUnsupported | None:
        """The error that writing ``address`` would raise, or ``None``."""
        refused = self._common_refusal("steer", address)
        if refused is not None or address.module_path is not None:
            return refused
        support, spec = self.support(address.name), self.specs[address.name]
        if not (spec.writable and support.writable):
            return self._refuse("write_point", support.why, address)
        if self.spec.static is not None and address.bare() not in self.static_writes:
            return self._undeclared(address, "static_writes")
        return None

    def describe(self) -> dict[str, Any]:
        """One JSON-able record of it all."""
        from interp_core.description import describe_profile

        return describe_profile(self)

    def _capability_refusal(self, name: str) -> CapabilityUnsupported | None:
        row = self.capabilities[name]
        why = instead = ""
        if name == "logit_lens" and not self.residual_basis.lens_valid:
            why, instead = "; ".join(self.residual_basis.blockers), self.residual_basis.instead
        elif name == "gradients":
            if self.grad_support.through_forward:
                return None
            why, instead = "; ".join(self.grad_support.blockers), self.grad_support.remedy
        elif name in ("read_point", "write_point", "residual_stream"):
            return self._general_point_refusal(name)
        elif name == "attention" and name in self.spec.capabilities:
            if self.support("attn_scores").readable:
                return None
            why = self.support("attn_scores").why
            instead = self._elsewhere(name, Address("attn_scores")) or "another model; this trunk has none"
        elif name in self.spec.capabilities:
            return None
        return CapabilityUnsupported(
            capability=name,
            why=why or self.spec.lacks.get(name) or row.why,
            instead=instead or row.instead,
            backend=self.backend,
            architecture=self.architecture_name if name == "logit_lens" else None,
            owner=row.owner,
        )

    def _common_refusal(self, capability: str, address: Address) -> CapabilityUnsupported | None:
        """What reading and writing are refused for alike."""
        refused = self._capability_refusal(capability)
        if refused is not None:
            return self._at(refused, address)
        if address.module_path is not None:
            return self._capability_refusal("module_path")
        return self._absence(address)

    def _general_point_refusal(self, name: str) -> CapabilityUnsupported | None:
        # Rows about points as such: refused where no point at all could be served.
        if name == "residual_stream":
            return None if self.facts.n_streams == 1 else self._refuse(name, "", Address("resid_post"))
        row = "capture" if name == "read_point" else "steer"
        return self._capability_refusal(row)

    def _absence(self, address: Address) -> CapabilityUnsupported | None:
        spec = self.specs[address.name]
        reason = spec.absent.get(None) or spec.absent.get(address.layer)
        if "streams" in spec.axes and address.name in _RESIDUALS and address.coordinate("stream") is None:
            reason = (
                f"this trunk carries {self.facts.n_streams} residual streams, so there is no single residual vector"
            )
        if not reason:
            return None
        if address.name in _RESIDUALS and self.facts.n_streams > 1:
            return self._refuse("residual_stream", reason, address)
        capability = _POINT_CAPABILITIES.get(address.name, "read_point")
        return self._refuse(capability, reason, address)

    def _refuse(self, capability: str, why: str, address: Address) -> CapabilityUnsupported:
        row = self.capabilities[capability]
        return CapabilityUnsupported(
            capability=capability,
            why=why or row.why,
            instead=self._way_forward(capability, address) or row.instead,
            backend=self.backend,
            architecture=self.architecture_name,
            point=address.name,
            layer=address.layer,
            owner=row.owner,
        )

    def _way_forward(self, capability: str, address: Address) -> str:
        if self.architecture is not None and address.name in self.architecture.refused:
            return self.architecture.refused[address.name]
        if self.architecture is None and (capability == "residual_stream" or not self.facts.structure_known):
            package = "interp-" + self.facts.model_type.removesuffix("_text").replace("_", "-")
            return (
                f"install a plugin that describes this trunk (by convention {package!r}, as in pip install {package}), "
                "or register an Architecture of your own; on a trunk of several streams it serves resid_streams "
                "and resid_post.N.stream-K"
            )
        return self._elsewhere(capability, address)

    def _elsewhere(self, capability: str, address: Address) -> str:
        """Another backend that serves a point which this one does not."""
        for name, support in self.specs[address.name].support.items():
            served = support.writable if capability == "write_point" else support.readable
            if name != self.backend and served and capability in ("read_point", "write_point", "attention"):
                return (
                    f"backend={name!r} serves this point on models that it runs; inspect_model(..., backend={name!r}) "
                    "says whether on this one"
                )
        return ""

    def _undeclared(self, address: Address, keyword: str) -> CapabilityUnsupported:
        declared = self.static_points if keyword == "static_points" else self.static_writes
        wanted = [*map(str, declared), str(address.bare())]
        shown = wanted if len(wanted) <= 4 else [*wanted[:2], "...", wanted[-1]]
        row = "read_point" if keyword == "static_points" else "write_point"
        return self._refuse_with(
            row, address, f"load_model({self.model_id!r}, backend={self.backend!r}, {keyword}={shown})"
        )

    def _refuse_with(self, capability: str, address: Address, call: str) -> CapabilityUnsupported:
        return CapabilityUnsupported(
            capability=capability,
            why="the forward is compiled, and this address was not declared when the model was loaded",
            instead=call,
            backend=self.backend,
            point=address.name,
            layer=address.layer,
        )

    def _at(self, refused: CapabilityUnsupported, address: Address) -> CapabilityUnsupported:
        return CapabilityUnsupported(
            capability=refused.capability,
            why=refused.why,
            instead=refused.instead,
            backend=refused.backend,
            point=address.name,
            layer=address.layer,
            owner=refused.owner,
        )
