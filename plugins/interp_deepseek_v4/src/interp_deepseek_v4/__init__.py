"""DeepSeek-V4 for interp-core: the trunk with four residual streams."""

__version__ = "0.1.0"
