"""Gradients by path, and a test of whether equal starts receive equal ones: lanes, and this project's adapters."""
