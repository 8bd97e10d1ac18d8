"""`python -m looseleaf.cli`: the command line without the installed script."""

from looseleaf.cli.main import app

if __name__ == "__main__":
    app(prog_name="looseleaf")
