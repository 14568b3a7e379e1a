"""Implementations under test, each behind the same interface."""
