"""Adapters to trainers; never imported by the package itself."""
