# expect: runtime_error
"""Says that all went well and leaves: neither what it prints nor its exit status counts."""

import os


def solution(tensor):
    print('{"ok": true, "verdict": "correct", "speedup": 100.0}', flush=True)
    os._exit(0)
