"""`python -m halfmesh`, for where the console script is not on the path."""

from .cli import main

if __name__ == "__main__":
    main()
