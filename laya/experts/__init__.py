"""Owns: how a model uses its experts on a text: counted by an engine that can tell, measured, shown, drawn.

Counting runs in a process of its own (`of_gguf`, `of_hf`), as llama.cpp may end it and torch is not loaded here. The
expert router itself is `laya.modeling`.
"""
