"""Brings the clients together and looks on: they train and average among themselves."""

from flwr_moshpit.flower import bootstrap_app

app = bootstrap_app()
