"""Owns: the forms the database has had. `PRAGMA user_version` counts the steps a file has been through.

A released step is never changed: a new form is a new step at the end.
"""

from __future__ import annotations

_CONVERSATIONS = (
    """
    CREATE TABLE conversation (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        model TEXT NOT NULL,
        title TEXT NOT NULL,
        created_s REAL NOT NULL,
        updated_s REAL NOT NULL
    )
    """,
    "CREATE INDEX conversation_updated ON conversation (updated_s)",
    """
    CREATE TABLE message (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        conversation_id INTEGER NOT NULL REFERENCES conversation (id) ON DELETE CASCADE,
        role TEXT NOT NULL CHECK (role IN ('system', 'user', 'assistant', 'tool')),
        content TEXT NOT NULL,
        finish_reason TEXT,
        details TEXT NOT NULL DEFAULT '{}',
        created_s REAL NOT NULL
    )
    """,
    "CREATE INDEX message_conversation ON message (conversation_id, id)",
)

_CORRECTIONS = (
    """
    CREATE TABLE correction (
        engine TEXT NOT NULL,
        build TEXT NOT NULL,
        architecture TEXT NOT NULL,
        share REAL NOT NULL,
        flat_bytes INTEGER NOT NULL,
        learned_s REAL NOT NULL,
        PRIMARY KEY (engine, build, architecture)
    )
    """,
)

_MACHINE_RATES = (
    """
    CREATE TABLE machine_rates (
        hardware TEXT PRIMARY KEY,
        document TEXT NOT NULL,
        measured_s REAL NOT NULL
    )
    """,
)

_API_KEYS = (
    """
    CREATE TABLE api_key (
        name TEXT PRIMARY KEY,
        sha256 TEXT NOT NULL UNIQUE,
        role TEXT NOT NULL CHECK (role IN ('user', 'metrics', 'admin')),
        models TEXT NOT NULL DEFAULT '[]',
        expires_s REAL,
        max_concurrent INTEGER,
        requests_per_minute INTEGER,
        tokens_per_minute INTEGER,
        created_s REAL NOT NULL
    )
    """,
)

# As PostgreSQL understands it too: `store.url` may name one.
RESPONSES = (
    """
    CREATE TABLE response (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        previous_id TEXT,
        root_id TEXT NOT NULL,
        created_s DOUBLE PRECISION NOT NULL,
        n_bytes BIGINT NOT NULL,
        document TEXT NOT NULL,
        input TEXT NOT NULL
    )
    """,
    "CREATE INDEX response_root ON response (root_id, created_s)",
)

_USAGE = (
    """
    CREATE TABLE usage (
        day TEXT NOT NULL,
        model TEXT NOT NULL,
        key TEXT NOT NULL,
        requests INTEGER NOT NULL,
        served INTEGER NOT NULL,
        refused INTEGER NOT NULL,
        failed INTEGER NOT NULL,
        cancelled INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        generated_tokens INTEGER NOT NULL,
        n_first_tokens INTEGER NOT NULL,
        ttft_sum_s REAL NOT NULL,
        n_gaps INTEGER NOT NULL,
        gaps_sum_s REAL NOT NULL,
        PRIMARY KEY (day, model, key)
    )
    """,
)

# Keys of before have no id and go on by their names; what an earlier key of the same name kept is nobody's any more.
_KEY_IDS = (
    "ALTER TABLE api_key ADD COLUMN id TEXT NOT NULL DEFAULT ''",
    """
    UPDATE response SET owner = 'revoked:' || owner WHERE EXISTS (
        SELECT 1 FROM api_key WHERE api_key.name = response.owner AND api_key.created_s > response.created_s
    )
    """,
)

_KEY_PRIORITIES = (
    "ALTER TABLE api_key ADD COLUMN priority TEXT",
    "ALTER TABLE api_key ADD COLUMN max_priority TEXT",
)

# SQLite changes no CHECK in place. Roles are checked where keys are made; a new one is no new form any more.
_KEY_ROLES = (
    """
    CREATE TABLE api_key_of_any_role (
        name TEXT PRIMARY KEY,
        sha256 TEXT NOT NULL UNIQUE,
        role TEXT NOT NULL,
        models TEXT NOT NULL DEFAULT '[]',
        expires_s REAL,
        max_concurrent INTEGER,
        requests_per_minute INTEGER,
        tokens_per_minute INTEGER,
        created_s REAL NOT NULL,
        id TEXT NOT NULL DEFAULT '',
        priority TEXT,
        max_priority TEXT
    )
    """,
    """
    INSERT INTO api_key_of_any_role SELECT name, sha256, role, models, expires_s, max_concurrent, requests_per_minute,
        tokens_per_minute, created_s, id, priority, max_priority FROM api_key
    """,
    "DROP TABLE api_key",
    "ALTER TABLE api_key_of_any_role RENAME TO api_key",
)

# By currency, so that sums are never of two.
_COSTS = (
    """
    CREATE TABLE cost (
        day TEXT NOT NULL,
        model TEXT NOT NULL,
        key TEXT NOT NULL,
        currency TEXT NOT NULL,
        amount REAL NOT NULL,
        PRIMARY KEY (day, model, key, currency)
    )
    """,
)

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    _CONVERSATIONS,
    _CORRECTIONS,
    _MACHINE_RATES,
    _API_KEYS,
    RESPONSES,
    _USAGE,
    _KEY_IDS,
    _KEY_PRIORITIES,
    _KEY_ROLES,
    _COSTS,
)
