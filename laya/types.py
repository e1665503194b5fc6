"""Owns: the values that pass between rooms. Knows no room, no I/O, no library but msgspec.

Every quantity carries its unit in its name (`kv_bytes`, `wait_us`). A `Plan` is what the memory room says of a
model before a byte of it is read; a `ModelFile` is what the models room found on disk; an `EngineAddress` is
what the gateway needs to speak to a running engine.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

Task = Literal["chat", "embed", "rerank", "decide"]
Priority = Literal["system", "interactive", "default", "bulk"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)  # the most urgent first
KeyRole = Literal["user", "metrics", "peer", "admin"]
RoutePolicy = Literal[
    "auto", "session", "prefix", "least_tokens", "power_of_two", "weighted", "hash", "round_robin"
]  # how a model's endpoint is chosen; the order is the native core's
KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
ALL_LAYERS = 9999  # of any model
ANY_LENGTH = 2**31 - 1  # tokens of a sequence, where only the engine itself knows how many it takes


class EndpointKind(enum.IntEnum):
    """Which API a request came in by; a field of the 32-byte routing feature."""

    CHAT = 1
    COMPLETION = 2
    EMBEDDING = 3
    RERANK = 4
    DECISION = 5


class KeyGrant(msgspec.Struct, frozen=True, kw_only=True):
    """What an API key may do, and the digest that it is known by. None: no limit."""

    name: str
    sha256: str  # hex digits
    role: KeyRole = "user"
    models: tuple[str, ...] = ()  # ids, aliases or pools that it may use; none: all
    expires_s: float | None = None  # Unix time
    max_concurrent: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers together
    priority: Priority | None = None  # of requests that ask for none; None: "default"
    max_priority: Priority | None = None  # the most urgent it may ask for; None: by its role
    created_s: float | None = None  # Unix time; None: it stands in config.yaml
    id: str = ""  # of this key and no other, also of none that has its name later; "": the name is all there is

    @property
    def owner(self) -> str:
        """Whose what it stores is: for a key of the config its name, so that its secret may change."""
        return self.id or self.name


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """What serves a model that can be named in a request, as far as it is on this disk."""

    id: str
    path: Path  # the .gguf file, the folder of a Hugging Face model, the program, or the other server's name
    format: Literal["gguf", "hf", "program", "remote"]
    file_bytes: int
    origin: str  # "pulled", "models_dir", "config", "ollama", "lmstudio", "llama.cpp", "huggingface"
    aliases: tuple[str, ...] = ()
    source: str | None = None  # where it was pulled from
    chat_template: str | None = None  # replaces the one in the file (the catalogue gives smollm2 a tool template)
    task: Task | None = None  # what the catalogue knows it is for; None: not known, the config or "chat" decides


class AskedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked of a model; None means auto. What is set here is never changed by the fit."""

    max_seq_len: int | None = None  # tokens per sequence
    max_num_seqs: int | None = None  # sequences at once
    kv_cache_dtype: str | None = None  # f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0
    kv_pool_tokens: int | None = None  # None = max_seq_len x max_num_seqs, one slot each; lower = one shared pool
    memory_limit_bytes: int | None = None  # of RAM, for this model alone; the budget still bounds it
    prompt_cache_bytes: int | None = 0  # of old prompts that the engine keeps in RAM; None = auto
    kv_pool_chat_tokens: int | None = None  # a pool of one whole sequence, and so many tokens for each further one
    n_threads: int | None = None
    task: Task = "chat"
    mmap: bool = True
    mmproj_path: Path | None = None
    draft_path: Path | None = None
    gpu_layers: int | None = None  # layers on GPUs, the output counted as one; None: as many as fit
    experts_on_cpu: int | None = None  # the first so many layers keep their experts in RAM; None: as few as needed
    gpus: tuple[int, ...] = ()  # the GPUs that share its layers, by number; none: as few of all as hold it
    tensor_split: tuple[float, ...] = ()  # the share of each of `gpus`; none: as their memory allows


class PlannedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is started with: every field decided."""

    max_seq_len: int  # what Laya promises a sequence
    slot_tokens: int  # what the engine allocates per sequence (padded), or the whole pool when unified
    max_num_seqs: int
    kv_cache_dtype: str
    kv_unified: bool
    kv_pool_tokens: int  # tokens that can be held at once, all sequences together
    n_batch: int
    n_ubatch: int
    n_threads: int
    task: Task
    mmap: bool
    gpu_layers: int = 0  # the output counted as one; the last so many
    tensor_split: tuple[int, ...] = ()  # of them, how many lie on each GPU, by its number; (): no GPU was at hand
    experts_on_cpu: int = 0  # layers, the first ones
    spills: bool = False  # what the GPUs at hand do not hold lies in RAM, and nobody asked for that
    draft_gpu_layers: int = 0
    mtp_layers: int = 0  # beyond gpu_layers: of multi-token prediction, where all lie on GPUs; engines may count them
    prompt_cache_bytes: int = 0  # of old prompts that the engine keeps in RAM, whole mebibytes

    @property
    def gpus(self) -> tuple[int, ...]:
        """The numbers of the GPUs that have a layer."""
        return tuple(number for number, n_layers in enumerate(self.tensor_split) if n_layers)

    @property
    def is_computed(self) -> bool:
        """Whether its cache was planned here; a program keeps one that Laya knows nothing of."""
        return self.kv_pool_tokens > 0

    @property
    def size_words(self) -> str:
        """`2 x 4096 f16`."""
        if not self.is_computed:
            length = "any length" if self.max_seq_len == ANY_LENGTH else str(self.max_seq_len)
            return f"{self.max_num_seqs} x {length}"
        return f"{self.max_num_seqs} x {self.max_seq_len} {self.kv_cache_dtype}"

    @property
    def is_pool_short(self) -> bool:
        """Whether the pool that sequences share can run out: then each has a ceiling, and promises are kept."""
        holds_all = self.task != "chat" and self.kv_pool_tokens >= self.max_num_seqs * self.max_seq_len
        return self.kv_unified and not holds_all


class DevicePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger of one device. `terms` sums to `total_bytes`."""

    device: str  # "cpu"; later "gpu0", ...
    budget_bytes: int
    terms: dict[str, int]  # weights, kv_cache, compute, output, overhead, prompt_cache, draft, projector: bytes
    total_bytes: int


class Suggestion(msgspec.Struct, frozen=True, kw_only=True):
    """A change that does fit, planned the same way."""

    flags: str  # as typed on the command line, e.g. "--max-num-seqs 1 --max-seq-len 4096"
    total_bytes: int
    note: str


class VariantPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One file of several that hold the same model, as it was planned; `need_bytes` at the settings of that plan."""

    id: str
    quantization: str  # "q8_0"; of a Hugging Face folder "awq", or "none"
    need_bytes: int
    fits: bool


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """The file that `quantization` chose, and why. `tried`: those that were planned, the best quality first."""

    id: str
    quantization: str
    path: str
    reason: str
    tried: list[VariantPlan]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a model needs, what there is, what was chosen and why. `laya plan --json` is this."""

    model: str
    fits: bool
    devices: list[DevicePlan]
    settings: PlannedSettings
    reasons: dict[str, str]  # setting -> why it has this value; only settings that were chosen, not asked
    suggestions: list[Suggestion]
    verdict: str  # one line, article B's 80 % rule
    exact: bool = True  # False: the architecture is unknown and the figures are a named upper bound
    notes: list[str] = []
    variant: Variant | None = None  # where `quantization` is said

    @property
    def need_bytes(self) -> int:
        return sum(device.total_bytes for device in self.devices)

    @property
    def ram(self) -> DevicePlan:
        """What of it lies in RAM, which is what an engine is measured by."""
        return next(device for device in self.devices if device.device == "cpu")

    @property
    def shortest(self) -> DevicePlan:
        """The device that has the least to spare, or lacks the most."""
        return max(self.devices, key=lambda device: device.total_bytes - device.budget_bytes)

    @property
    def budget_bytes(self) -> int:
        return sum(device.budget_bytes for device in self.devices)


class GpuLayers(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of a model on GPUs, the output counted as one."""

    planned: int
    loaded: int  # as the engine itself tells
    total: int | None = None  # that the model has; None: the engine did not tell
    why_none: str | None = None  # why none could be planned, though the engine is built for a GPU

    @property
    def is_short(self) -> bool:
        """Whether the CPU computes what a GPU was to compute."""
        return self.loaded < self.planned or self.why_none is not None


class EngineAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a running engine listens and how to speak to it."""

    host: str
    port: int
    api_key: str | None
    keeps_streams: bool = True  # False: it closes the connection after a streamed answer, whatever its headers say
    has_slots: bool = False  # True: a request may name its sequence, and what is cached there is reused by default
    dialect: Literal["llamacpp", "openai"] = "llamacpp"  # what it knows beside OpenAI's API: tokens, progress, schemas
    model: str | None = None  # what it is to be asked for, where that is not Laya's id
    renames: bool = False  # its answers may carry another name of the model than Laya's id
    is_remote: bool = False  # on another machine, or another Laya: nothing native reads its connections
    tls: Any = None  # an ssl.SSLContext; None: it speaks plain HTTP
    base_path: str = "/v1"  # what the paths of OpenAI's API are behind
    headers: tuple[tuple[str, str], ...] = ()  # sent with each request
    connect_timeout_s: float | None = None
    idle_limit_s: float = 4.0  # of a kept connection, before the engine closes it
    alive_path: str | None = "/slots"  # answered at any time while it lives; None: nothing is
    gpu_layers: GpuLayers | None = None  # None: none were planned there, or nothing is known of them
    template_tokens: int | None = None  # a bound, measured, of what its chat template adds; None: nobody asked
    answers_kept: int = 10_000  # answers after which a kept connection is retired, before the engine closes it
    cancels_whole: bool  # True: a whole (non-streamed) answer is cancelled when the client leaves, so it is relayed raw


ModelState = Literal["unloaded", "loading", "ready", "degraded", "draining", "failed"]


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One model as `laya ps`, /admin/state and the metrics show it."""

    id: str
    state: ModelState
    task: Task
    since_s: float
    plan: Plan | None = None
    measured_bytes: int | None = None  # peak resident bytes of the child
    anonymous_bytes: int = 0  # what it holds now that the kernel can't drop
    pid: int | None = None
    node: str | None = None  # of a cluster, where its engine is; None: this machine
    error: str | None = None
    restarts: int = 0
    gpu_layers: GpuLayers | None = None  # of the engine that runs, where layers were planned for a GPU
    extra: dict[str, Any] = {}
