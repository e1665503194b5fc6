"""Owns: making Mixture-of-Experts models: training them from text, and upcycling dense ones. Needs `laya-llm[torch]`.

Runs in processes of its own (`laya.cli.lab` starts them): serving imports nothing of this.
"""
