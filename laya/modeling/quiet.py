"""Owns: keeping Transformers' bars and advice out of what a verb of the lab prints: it has a progress of its own."""

from __future__ import annotations

from transformers.utils import logging


def quiet_transformers() -> None:
    """For the whole process."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
