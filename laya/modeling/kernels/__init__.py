"""Owns: what computes a gate faster than plain torch operations do. Each is held to laya/modeling/selection.py."""
