"""``python -m siamesenorm``."""

from siamesenorm.cli import main

if __name__ == "__main__":
    main()
