"""The subcommands of `flwr-moshpit`, one module each."""
