"""All tests, as two runs of pytest side by side: those that start vLLM engines, and the others.

    python tools/run_tests.py [arguments for one run of pytest]

An engine computes in processes of its own, one at a time, so that one core is enough for it and for its tests, and
the other core does the rest meanwhile. With arguments there is one run with those. The exit status is that of the
first run that failed, and the last line is the summary of the second run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

_REST = ("-m", "not vllm")
_ENGINES = ("-m", "vllm", "-p", "no:cacheprovider")


def main(arguments: list[str]) -> int:
    """Run them."""
    command = [sys.executable, "-m", "pytest"]
    if arguments:
        return subprocess.run([*command, *arguments], check=False).returncode
    with tempfile.TemporaryFile("w+", encoding="utf-8") as report:
        # Unbuffered, so that a run that is killed has said how far it came.
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        engines = subprocess.Popen([*command, *_ENGINES], stdout=report, stderr=subprocess.STDOUT, env=environment)
        try:
            rest = subprocess.run([*command, *_REST], check=False).returncode
            failed = engines.wait()
        finally:
            if engines.poll() is None:
                engines.terminate()
                engines.wait()
            report.seek(0)
            print(report.read(), end="", flush=True)
    return rest or failed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
