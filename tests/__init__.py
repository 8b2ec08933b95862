"""Tests. A package by name, since other distributions leave a package called tests behind."""
