"""The app of `flower_overhead.py`."""
