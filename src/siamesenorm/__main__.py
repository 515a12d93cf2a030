"""``python -m siamesenorm``, which is how ``torchrun`` starts the command line."""

from siamesenorm.cli import main

if __name__ == "__main__":
    main()
