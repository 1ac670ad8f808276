"""``python -m interp_core.cli``."""

from __future__ import annotations

from interp_core.cli.main import main

if __name__ == "__main__":
    main()
