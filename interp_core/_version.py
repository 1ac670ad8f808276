"""The one place that names the version of interp-core."""

__version__ = "0.1.0"
