"""Recognising handwritten digits, as a Flower app."""
