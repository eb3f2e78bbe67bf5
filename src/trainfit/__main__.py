"""`python -m trainfit` is the command line, as `trainfit` is."""

from trainfit.cli.commands import main

if __name__ == "__main__":
    main()
