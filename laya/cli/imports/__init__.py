"""The files of other programs as a configuration of Laya's: one module for each program, and what they share.

Each reader gives a `Draft`: the configuration, and what of the file has no counterpart, told by its key and line.
"""
