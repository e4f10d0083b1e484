"""``python -m peerlane``."""

from peerlane.cli import main

if __name__ == "__main__":
    main()
