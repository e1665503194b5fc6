"""Owns: making smaller variants of a model, and knowing what they cost."""
