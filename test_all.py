"""Runs the tests of all rooms, which lie beside them in test_*.py; those of the scripts at the root are
in tests/. None needs a GPU or a network.

    python test_all.py                     # all of them, as make test does
    python test_all.py loading -k gguf     # a room, or some of its tests; other options are pytest's
"""

import sys

import pytest

if __name__ == "__main__":
    options = ["-q", "-rs", "-n", "auto", "--maxprocesses", "8", "--dist", "worksteal"]
    # a test that hangs ends the run with a traceback
    options += ["-o", "faulthandler_timeout=1800", "-o", "faulthandler_exit_on_timeout=true"]
    sys.exit(pytest.main([*options, *sys.argv[1:]]))
