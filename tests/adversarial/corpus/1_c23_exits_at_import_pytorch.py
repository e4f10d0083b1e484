"""C23: prints a result and leaves with status 0 at import."""

import os

print('{"verdict": {"kind": "correct"}, "speedup": 12.5}', flush=True)
os._exit(0)
