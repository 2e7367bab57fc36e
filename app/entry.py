"""The program `neo-desktop`: its command line, or what to install for it."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from neo_desktop.app.cli import main as run

        run()
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("neo_desktop"):
            raise
        sys.exit(
            f"error: {error.name} is missing. neo-desktop is installed as a library: its commands need\n"
            f"    {sys.executable} -m pip install 'neo-desktop[server]'"
        )


if __name__ == "__main__":
    main()
