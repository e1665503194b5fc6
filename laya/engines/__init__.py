"""Owns: engines, that is the processes that hold a model's weights and generate tokens.

A local engine is a child process of `laya serve`, spoken to over loopback HTTP. This room plans no memory and routes
no request: it is handed decided settings, makes a child ready, and says when it is gone. This package file imports
nothing, because the child program loads it too and every megabyte there is counted against the model.
"""
