"""Tiny random models of every decoder that transformers has, and the conformance run over them."""
