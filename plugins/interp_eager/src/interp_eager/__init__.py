"""The eager backend of interp-core: Hugging Face transformers in this process."""

__version__ = "0.1.0"
