"""Owns: which correction is whose: the engine, its build and the architecture of a model's file; kept in the store.

Where the memory room's arithmetic and the store meet.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from laya.config import Program, ResolvedModel
from laya.engines.builds import PACKAGE, used
from laya.memory import Correction, read_facts
from laya.models import home_path
from laya.store import LearnedCorrection, Store
from laya.types import Plan

Key = tuple[str, str, str]  # engine, build, architecture
PROGRAM = "command"  # the engine of what was learned of programs: all of it is bytes, and its architecture the model


class Corrections:
    """What was learned on this machine. Reads the file's header; blocks."""

    def __init__(self, path: Path) -> None:
        """path: the database; it is opened when the first thing is asked or learned."""
        self.path = path
        self._known: dict[Key, Correction] | None = None

    def of(self, settings: ResolvedModel, path: Path) -> Correction:
        """What is known of such an engine. Raises BadModelFile, StoreError."""
        return self.of_key(key_of(settings, path)) if self._all() else Correction()

    def of_key(self, key: Key) -> Correction:
        """What is known of engines of this kind, build and architecture. Raises StoreError."""
        return self._all().get(key, Correction())

    def learn(
        self, settings: ResolvedModel, path: Path, plan: Plan, peak_bytes: int, *, was_killed: bool = False
    ) -> None:
        """An engine of this plan was seen to hold `peak_bytes`. Raises BadModelFile, StoreError."""
        self.learn_key(key_of(settings, path), plan, peak_bytes, was_killed=was_killed)

    def learn_key(self, key: Key, plan: Plan, peak_bytes: int, *, was_killed: bool) -> None:
        """The same, of engines of this kind, build and architecture. Raises StoreError."""
        known = self.of_key(key)
        learned = known.after(plan, peak_bytes, was_killed=was_killed)
        if learned != known:
            self.keep(key, learned)

    def keep(self, key: Key, learned: Correction) -> None:
        """This is known of such engines from now on. Raises StoreError."""
        self._all()[key] = learned
        engine, build, architecture = key
        row = LearnedCorrection(
            engine=engine,
            build=build,
            architecture=architecture,
            share=learned.share,
            flat_bytes=learned.flat_bytes,
        )
        with Store(self.path) as store:
            store.keep_correction(row)

    def of_program(self, model_id: str, program: Program) -> int | None:
        """The most that this program was seen to hold; None: it has not run yet. Raises StoreError."""
        known = self._all().get(program_key(model_id, program))
        return known.flat_bytes if known is not None else None

    def keep_program(self, model_id: str, program: Program, n_bytes: int) -> None:
        """It was seen to hold so much. Raises StoreError."""
        key = program_key(model_id, program)
        if self._all().get(key) != Correction(flat_bytes=n_bytes):
            self.keep(key, Correction(flat_bytes=n_bytes))

    def _all(self) -> dict[Key, Correction]:
        if self._known is None:
            rows: list[LearnedCorrection] = []
            if self.path.exists():
                with Store(self.path) as store:
                    rows = store.corrections()
            self._known = {
                (row.engine, row.build, row.architecture): Correction(share=row.share, flat_bytes=row.flat_bytes)
                for row in rows
            }
        return self._known


def nothing_learned() -> Corrections:
    """For a plan where there is no database, or a broken one."""
    return Corrections(Path("/nonexistent"))


def program_key(model_id: str, program: Program) -> Key:
    """Another command line or environment is another program. What it was given from the environment only counts by
    its digest, as the rest does."""
    said = msgspec.json.encode([program.words, str(program.cwd), sorted(program.env.items())])
    return PROGRAM, hashlib.sha256(said).hexdigest()[:32], model_id


def key_of(settings: ResolvedModel, path: Path) -> Key:
    """The engine, its build and the architecture that share a correction. Raises BadModelFile."""
    return *build_of(settings.engine_path), read_facts(path).shape.architecture


def build_of(engine_path: Path | None) -> tuple[str, str]:
    """Name and build of an engine. A binary of the user's own is another build when its file has changed."""
    if engine_path is None:
        build = used(home_path())
        return PACKAGE, build.version if build.folder is None else build.name
    try:
        stat = engine_path.stat()
    except OSError:
        return str(engine_path), "missing"
    return str(engine_path), f"{stat.st_size}-{stat.st_mtime_ns}"
