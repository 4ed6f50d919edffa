"""Run the command line as `python -m labhelpers`."""

from labhelpers.cli import main

if __name__ == "__main__":
    main()
