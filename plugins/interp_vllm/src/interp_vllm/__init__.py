"""The vLLM backends of interp-core."""

__version__ = "0.1.0"
