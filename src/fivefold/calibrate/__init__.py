"""Measuring the machine at hand: its points, what is fitted to them, and its cluster file."""
