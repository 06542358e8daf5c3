"""The console command. It puts the project's own folder first on the path before anything of it is imported, so that a
`data.py` or `models.py` of the user's, on PYTHONPATH or in the working directory, cannot take the place of ours."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))


def main() -> None:
    """Run the command line."""
    from launch.cli import run

    run()


if __name__ == "__main__":
    main()
