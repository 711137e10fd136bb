"""The subcommands of `python -m moqext`."""
