"""Modules that would end the program when they are imported."""
