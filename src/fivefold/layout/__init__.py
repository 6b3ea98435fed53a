"""Layouts: how they are written, which are legal, and which rank does what. Pure values."""
