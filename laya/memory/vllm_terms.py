"""Owns: what vLLM takes on each GPU, or in RAM for each worker of its CPU build, beside its KV cache: weights,
activations at their peak, CUDA graphs, overhead.

Weights are exact where a tensor table was read; the others are bounds whose slopes come from logged runs, rounded up.
Knows no budget and no KV cache. Sources: vllm/v1/worker and the logs that tests/memory/test_memory_vllm.py names.
"""

from __future__ import annotations

from laya.memory.hf import HfFacts
from laya.memory.vllm_cache import VllmSettings, stage_layers
from laya.types import GIB, MIB

ACTIVATION_MARGIN = 1.25  # on the peak of the formula: the allocator's rounding, and buffers of kernels
SAMPLER_BYTES = 42  # per row and vocabulary entry: logits, probabilities, sorted values and their 8-byte indices
LATENT_WORKSPACE_TOKENS = 65536  # of earlier tokens that latent attention expands at once in a prefill
ENCODER_TOKENS = 16384  # of the largest image or sound that is tried
ENCODER_PATCHES = 4  # that one of its tokens stands for
GRAPH_BASE_BYTES = 256 * MIB
GRAPH_PIECE_BYTES = 400 << 10  # of one captured size and layer
LARGEST_GRAPH = 512  # tokens
CONTEXT_BYTES = 460 * MIB  # CUDA context and libraries, which vLLM does not count into its share
NON_TORCH_BYTES = 512 * MIB  # cuBLAS, kernels' own workspaces
PARALLEL_BYTES = GIB  # NCCL and the buffers of all-reduce, where GPUs work together
PROCESS_BYTES, WORKER_BYTES = 2 * GIB, 3 * GIB // 2  # host memory: server and engine, and each GPU's worker
# The same of the CPU build, as measured (docs/memory.md): server and engine with the libraries that all map, and each
# worker before it has a model.
CPU_PROCESS_BYTES, CPU_WORKER_BYTES = 1072 * MIB, 440 * MIB
CPU_ACTIVATION_COPIES = 5.2  # of a batch at its widest point: results of several steps, and what the allocator keeps
CPU_OUTPUT_COPIES = 2.5  # of the output matrix: packed for the processor beside what was read, and on the way to it
CPU_COMPILED_BYTES, CPU_COMPILED_LAYER_BYTES = 160 * MIB, 2 * MIB  # a C++ compiler at work, and what it made


def gpu_terms(found: HfFacts, settings: VllmSettings, max_num_seqs: int, max_model_len: int) -> list[dict[str, int]]:
    """Term -> bytes of each GPU of a stage, one entry a pipeline stage, without the KV cache."""
    stages = stage_layers(found.shape.n_layer, settings.pipeline_parallel_size)
    return [
        {
            "weights": weights_on_gpu(found, settings, stage),
            "compute": activations(found, settings, max_num_seqs, max_model_len),
            "graphs": graphs(settings, max_num_seqs, len(stage)),
            "overhead": overhead(settings),
        }
        for stage in stages
    ]


def cpu_terms(found: HfFacts, settings: VllmSettings, max_num_seqs: int, max_model_len: int) -> list[dict[str, int]]:
    """Term -> bytes of each worker of the CPU build, one entry a pipeline stage, without the KV cache."""
    stages = stage_layers(found.shape.n_layer, settings.pipeline_parallel_size)
    output = (found.weights.output_bytes or found.weights.embedding_bytes) // settings.tensor_parallel_size
    return [
        {
            "weights": weights_on_gpu(found, settings, stage),
            "compute": cpu_activations(found, settings, max_num_seqs, max_model_len)
            + (round(CPU_OUTPUT_COPIES * output) if stage.stop == found.shape.n_layer else 0),
            "graphs": 0 if settings.enforce_eager else CPU_COMPILED_BYTES + len(stage) * CPU_COMPILED_LAYER_BYTES,
        }
        for stage in stages
    ]


def weights_on_gpu(found: HfFacts, settings: VllmSettings, stage: range) -> int:
    """Weights on one GPU: a share of the stage's matrices, and whole what no GPU shares."""
    weights, share = found.weights, settings.tensor_parallel_size
    is_first, is_last = stage.start == 0, stage.stop == found.shape.n_layer
    outside = weights.total_bytes - sum(weights.layer_bytes) - weights.nextn_bytes
    ends = weights.embedding_bytes + weights.output_bytes
    total = sum(weights.layer_bytes[stage.start : stage.stop])
    total += outside - ends  # what sees or hears, and norms: counted on every stage
    if is_first:
        total += weights.embedding_bytes
    if is_last:
        total += weights.output_bytes or (0 if is_first else weights.embedding_bytes)
    if settings.n_speculative_tokens and is_last:
        total += weights.nextn_bytes
    whole = min(total, weights.whole_bytes)
    on_gpu = (total - whole) // share + whole + _repeated_heads(found, share, stage)
    if found.quantization is None and not settings.computes_in_single:  # single precision is loaded as half
        on_gpu -= weights.float32_bytes // 2 * on_gpu // max(1, weights.total_bytes)
    return on_gpu


def _repeated_heads(found: HfFacts, share: int, stage: range) -> int:
    """KV heads that several GPUs hold because there are fewer heads than GPUs."""
    total = 0
    for layer in found.shape.layers[stage.start : stage.stop]:
        if layer.n_head_kv and layer.head_v and share > layer.n_head_kv:
            row = (layer.head_k + layer.head_v) * found.shape.n_embd * found.dtype_bytes
            total += row - row * layer.n_head_kv // share
    return total


def activations(found: HfFacts, settings: VllmSettings, max_num_seqs: int, max_model_len: int) -> int:
    """The peak of vLLM's profile run: the widest layer over a full batch, or the sampler over all sequences."""
    return _peak(found, settings, max_num_seqs, max_model_len, batch_copies=ACTIVATION_MARGIN)


def cpu_activations(found: HfFacts, settings: VllmSettings, max_num_seqs: int, max_model_len: int) -> int:
    """The same of the CPU build, which keeps more of a batch."""
    return _peak(found, settings, max_num_seqs, max_model_len, batch_copies=CPU_ACTIVATION_COPIES)


def _peak(found: HfFacts, settings: VllmSettings, max_num_seqs: int, max_model_len: int, *, batch_copies: float) -> int:
    shape, share = found.shape, settings.tensor_parallel_size
    batch = round(batch_copies * settings.max_num_batched_tokens * 2 * _widest(found, share))
    sampler = max_num_seqs * (1 + settings.n_speculative_tokens) * shape.n_vocab * SAMPLER_BYTES
    patches = max(settings.max_num_batched_tokens, ENCODER_TOKENS) * ENCODER_PATCHES
    encoder = patches * (found.encoder_width + found.encoder_width // share)  # half of it is shared out
    peak = max(batch, round(ACTIVATION_MARGIN * max(sampler, encoder)))
    return peak + _latent_workspace(found, share, max_num_seqs, max_model_len)


def _widest(found: HfFacts, share: int) -> int:
    """Elements that one token of a batch is widest at, on one GPU."""
    shape = found.shape
    gates = 3 if found.facts.n_ff_matrices == 3 else 2
    dense = gates * shape.n_ff if found.facts.n_ff_matrices else 0
    expert = shape.n_ff_expert
    routed = shape.n_expert_used * (max(2 * expert // share, shape.n_embd) + expert // share) + 2 * shape.n_expert
    feed_forward = max(dense // share, (routed if shape.n_expert else 0) + 3 * shape.n_ff_shared // share)
    n_head = max(shape.n_head, default=0)
    key = shape.head_dim_k_mla or shape.head_dim_k
    value = shape.head_dim_v_mla or shape.head_dim_v
    n_head_kv = n_head if shape.kv_lora_rank else max(shape.n_head_kv, default=0)
    attention = (2 * n_head * max(key, value) + n_head_kv * (key + value)) // share
    conv = max((layer.conv for layer in shape.layers), default=0)
    state = max((layer.state for layer in shape.layers), default=0)
    recurrent = (4 * conv + state // 64) // share  # chunks of 64 tokens keep a state each
    return 3 * shape.n_embd + max(feed_forward, attention, recurrent)


def _latent_workspace(found: HfFacts, share: int, max_num_seqs: int, max_model_len: int) -> int:
    shape = found.shape
    if not shape.head_dim_k_mla:
        return 0
    tokens = min(LATENT_WORKSPACE_TOKENS, max(8 * max_model_len, 64 * max_num_seqs))
    expanded = max(shape.n_head, default=0) * (shape.head_dim_k_mla + shape.head_dim_v_mla) // share
    return tokens * 2 * (shape.head_dim_k + expanded)


def graphs(settings: VllmSettings, max_num_seqs: int, n_layer: int) -> int:
    """CUDA graphs: sizes captured in pieces between attention, and whole for decoding, each with all layers."""
    if settings.enforce_eager:
        return 0
    tokens = max_num_seqs * (1 + settings.n_speculative_tokens)
    n_sizes = _captured(min(LARGEST_GRAPH, 2 * tokens)) + _captured(min(LARGEST_GRAPH, tokens))
    return GRAPH_BASE_BYTES + n_sizes * (n_layer + 1) * GRAPH_PIECE_BYTES


def _captured(largest: int) -> int:
    """How many batch sizes vLLM captures up to `largest`: 1, 2, 4, by eights to 256, then by sixteens."""
    few = sum(size <= largest for size in (1, 2, 4))
    return few + min(largest, 256) // 8 + max(0, largest - 256) // 16


def overhead(settings: VllmSettings) -> int:
    """The CUDA context and what is allocated beside PyTorch."""
    n_gpus = settings.tensor_parallel_size * settings.pipeline_parallel_size
    return CONTEXT_BYTES + NON_TORCH_BYTES + (PARALLEL_BYTES if n_gpus > 1 else 0)


def host_bytes(settings: VllmSettings, *, on_cpu: bool = False) -> int:
    """Host memory of the processes; of the CPU build without what its workers compute with."""
    n_workers = settings.tensor_parallel_size * settings.pipeline_parallel_size
    if on_cpu:
        return CPU_PROCESS_BYTES + settings.grammar_cache_bytes + CPU_WORKER_BYTES * n_workers
    return PROCESS_BYTES + WORKER_BYTES * n_workers
