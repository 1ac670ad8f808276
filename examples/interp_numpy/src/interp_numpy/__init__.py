"""A backend of interp-core in plain NumPy."""
