"""`python -m halfmesh.cli`, for where the console script is not on the path."""

from . import main

if __name__ == "__main__":
    main()
