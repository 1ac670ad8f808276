"""The place of the engine. It is not in this version, and saying so is all that happens here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from interp_core.errors import BackendUnavailable
from interp_core.profile import ModelProfile

__all__ = ["make_engine"]


def make_engine(profile: ModelProfile, options: Mapping[str, Any]) -> NoReturn:
    """Refuse to run.

    Raises:
        BackendUnavailable: always, in this version.
    """
    from interp_vllm import __version__

    raise BackendUnavailable(
        f"interp-vllm {__version__} describes what {profile.backend!r} serves, but does not bring the engine "
        "that runs it yet; use backend='eager', or a later interp-vllm"
    )
