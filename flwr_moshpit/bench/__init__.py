"""Measurements of this program against the bounds it must keep."""
