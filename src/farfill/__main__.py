"""`python -m farfill` is the command `farfill`."""

from farfill.cli import main

if __name__ == "__main__":
    main()
