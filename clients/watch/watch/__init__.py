"""Recognising movements from a smartwatch, as a Flower app."""
