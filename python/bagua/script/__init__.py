"""Standalone programs, under the original's names."""
