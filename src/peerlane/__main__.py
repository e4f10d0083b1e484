"""``python -m peerlane``."""

import os
import sys

if not sys.flags.safe_path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]  # a torch.py in the working directory, beside a candidate perhaps, is not the one that is meant

from peerlane.cli import main

if __name__ == "__main__":
    main()
