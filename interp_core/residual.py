"""What the residual stream of a trunk is, and what may be assumed about it."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen

from interp_core.converters import as_tuple

__all__ = ["ResidualBasis"]


@frozen(kw_only=True)
class ResidualBasis:
    """How the residual of a trunk is made, answered from configuration.

    Attributes:
        n_streams: number of parallel residual streams; 1 on a conventional decoder.
        additive: whether ``resid_post`` is the embeddings plus the sum of all contributions.
        sequential: whether attention writes before the MLP reads (``resid_mid`` exists) in every block.
        lens_valid: whether a row of ``resid_post`` may be unembedded as it is (logit lens).
        blockers: why not, for each "no" above.
        instead: what to do in place of a lens that is not valid; empty if it is.
    """

    n_streams: int = 1
    additive: bool = True
    sequential: bool = True
    lens_valid: bool = True
    blockers: tuple[str, ...] = field(default=(), converter=as_tuple)
    instead: str = ""

    def describe(self) -> dict[str, Any]:
        """The verdict as a JSON-able record with a sentence for people."""
        streams = "one residual stream" if self.n_streams == 1 else f"{self.n_streams} residual streams"
        adds = "contributions add up to it" if self.additive else "contributions do not simply add up"
        order = "attention before MLP" if self.sequential else "not sequential in every block"
        lens = "the logit lens is valid" if self.lens_valid else "the logit lens is not valid as it stands"
        return {
            "n_streams": self.n_streams,
            "additive": self.additive,
            "sequential": self.sequential,
            "lens_valid": self.lens_valid,
            "blockers": list(self.blockers),
            "instead": self.instead,
            "summary": f"{streams}; {adds}; {order}; {lens}.",
        }
