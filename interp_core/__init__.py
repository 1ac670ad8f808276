"""Read and write the inside of transformer language models, by name, on any backend.

Importing this package loads no torch, no transformers and no engine; names are imported when used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from interp_core._version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

    from interp_core.address import Address as Address
    from interp_core.address import parse_address as parse_address
    from interp_core.architecture import Architecture as Architecture
    from interp_core.architecture import Claim as Claim
    from interp_core.attribution import Attribution as Attribution
    from interp_core.attribution import attribute as attribute
    from interp_core.backend import Availability as Availability
    from interp_core.backend import BackendSpec as BackendSpec
    from interp_core.cache import Cache as Cache
    from interp_core.capabilities import Capability as Capability
    from interp_core.chat_spans import ChatTokens as ChatTokens
    from interp_core.chat_spans import MessageSpan as MessageSpan
    from interp_core.direct import DirectAttribution as DirectAttribution
    from interp_core.direct import direct_attribution as direct_attribution
    from interp_core.errors import AddressError as AddressError
    from interp_core.errors import BackendUnavailable as BackendUnavailable
    from interp_core.errors import CapabilityUnsupported as CapabilityUnsupported
    from interp_core.errors import InterpError as InterpError
    from interp_core.errors import ModelUnavailable as ModelUnavailable
    from interp_core.errors import PluginConflict as PluginConflict
    from interp_core.errors import PluginUnavailable as PluginUnavailable
    from interp_core.errors import RequestError as RequestError
    from interp_core.facts import LayerFacts as LayerFacts
    from interp_core.facts import ModelFacts as ModelFacts
    from interp_core.functions import capture_attention as capture_attention
    from interp_core.functions import capture_generation as capture_generation
    from interp_core.functions import decode_residuals as decode_residuals
    from interp_core.functions import generate as generate
    from interp_core.functions import generate_stream as generate_stream
    from interp_core.functions import run_with_cache as run_with_cache
    from interp_core.gradients import GradSupport as GradSupport
    from interp_core.harvest_reader import Harvest as Harvest
    from interp_core.harvest_reader import load_harvest as load_harvest
    from interp_core.harvesting import harvest as harvest
    from interp_core.hookspecs import hookimpl as hookimpl
    from interp_core.host import PluginHost as PluginHost
    from interp_core.host import default_host as default_host
    from interp_core.keywords import OptionSpec as OptionSpec
    from interp_core.lens import logit_lens as logit_lens
    from interp_core.loading import inspect_model as inspect_model
    from interp_core.loading import load_model as load_model
    from interp_core.model import InterpModel as InterpModel
    from interp_core.operations import Ablate as Ablate
    from interp_core.operations import Add as Add
    from interp_core.operations import Apply as Apply
    from interp_core.operations import Cap as Cap
    from interp_core.operations import NormScaledAdd as NormScaledAdd
    from interp_core.operations import Replace as Replace
    from interp_core.operations import Scale as Scale
    from interp_core.operations import Swap as Swap
    from interp_core.points import GENERAL_POINTS as GENERAL_POINTS
    from interp_core.points import PointSpec as PointSpec
    from interp_core.points import PointSupport as PointSupport
    from interp_core.profile import ModelProfile as ModelProfile
    from interp_core.residual import ResidualBasis as ResidualBasis
    from interp_core.results import AttentionRecord as AttentionRecord
    from interp_core.results import Completion as Completion
    from interp_core.results import GenStep as GenStep
    from interp_core.results import LensResult as LensResult
    from interp_core.steering import steer as steer
    from interp_core.sweeps import Sweep as Sweep
    from interp_core.sweeps import sweep as sweep
    from interp_core.trunk import TableTrunk as TableTrunk
    from interp_core.trunk import Trunk as Trunk

    CAPABILITIES: Mapping[str, Capability]

_HOMES: dict[str, str] = {
    "address": "Address parse_address",
    "architecture": "Architecture Claim",
    "attribution": "Attribution attribute",
    "backend": "Availability BackendSpec OptionSpec",
    "cache": "Cache",
    "capabilities": "Capability",
    "chat_spans": "ChatTokens MessageSpan",
    "direct": "DirectAttribution direct_attribution",
    "errors": "AddressError BackendUnavailable CapabilityUnsupported InterpError ModelUnavailable PluginConflict "
    "PluginUnavailable RequestError",
    "facts": "LayerFacts ModelFacts",
    "functions": "capture_attention capture_generation decode_residuals generate generate_stream run_with_cache",
    "gradients": "GradSupport",
    "harvest_reader": "Harvest load_harvest",
    "harvesting": "harvest",
    "hookspecs": "hookimpl",
    "host": "PluginHost default_host",
    "lens": "logit_lens",
    "loading": "inspect_model load_model",
    "model": "InterpModel",
    "operations": "Ablate Add Apply Cap NormScaledAdd Replace Scale Swap",
    "points": "GENERAL_POINTS PointSpec PointSupport",
    "profile": "ModelProfile",
    "residual": "ResidualBasis",
    "results": "AttentionRecord Completion GenStep LensResult",
    "steering": "steer",
    "sweeps": "Sweep sweep",
    "trunk": "TableTrunk Trunk",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = ["CAPABILITIES", "__version__", *sorted(_HOME_OF)]  # noqa: PLE0604 - built from the table above


def __getattr__(name: str) -> Any:
    if name == "CAPABILITIES":
        # Not cached here: it is the host's own table, and a host is made once per process.
        from interp_core.host import default_host

        host = default_host()
        host.load()
        return host.capabilities
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
