"""Quill, an example of an architecture from a package of its own."""

__version__ = "0.1.0"
