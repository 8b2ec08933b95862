"""Runnable examples, and the small modules that their YAML files name."""
