"""Owns: a router that uses its experts evenly, fitted to the hidden states that a layer's experts get.

Where experts are equal the language model's loss says nothing of the router, so what is fitted is balance alone:
Switch Transformer's loss of each document, so that a text of one kind is spread too; an entropy term, without which
that is met by logits that are all alike, whose top-k is anything; the z-loss. A start drawn at random needs little of
it: directions in which tokens differ much more than documents do, made equally wide, at equal angles.

A bias of the logits would even out what is left, but llama.cpp's `llama` has none: hidden states are of one length, so
a direction u with u @ x = 1 for nearly every token exists, and the bias goes into the matrix along it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from laya.modeling.balance import expert_counts, load_balancing_loss, router_z_loss

_LOGIT_WIDTH = 4.0  # standard deviation at the start: choices are clear, gradients not yet lost
_ENTROPY_WEIGHT, _Z_WEIGHT = 0.1, 1e-3
_LEARNING_RATE = 3e-3  # of the matrix's own standard deviation, falling to 0
_DOCUMENTS_A_STEP = 16
_BIAS_STEPS, _BIAS_RATE = 100, 0.3


def fit_router(states: Tensor, n_experts: int, top_k: int, *, n_steps: int, seed: int) -> Tensor:
    """[n_experts, hidden]. states: [documents, tokens, hidden] float32, a layer's normed input of its experts."""
    draw = torch.Generator().manual_seed(seed)
    flat = states.flatten(0, 1)
    one = _constant_direction(flat)
    weight = _even_out(_start(flat, n_experts, one, draw), flat, one, top_k)
    weight = _train(weight, states, top_k, n_steps, draw)
    return _even_out(weight, flat, one, top_k)


def factors_of(weight: Tensor) -> dict[str, Tensor]:
    """A router's matrix as the projection and the expert embeddings whose product it is, n_experts wide."""
    left, sizes, right = torch.linalg.svd(weight.double(), full_matrices=False)
    root = sizes.sqrt()
    return {"projection": (root[:, None] * right).float(), "expert_embeddings": (left * root).float()}


def _constant_direction(flat: Tensor) -> Tensor:
    """[hidden]: u with u @ x as near to 1 as least squares come."""
    second = flat.T @ flat / len(flat)
    ridge = 1e-4 * second.diagonal().mean() * torch.eye(len(second))
    one: Tensor = torch.linalg.solve(second + ridge, flat.mean(dim=0))
    return one


def _start(flat: Tensor, n_experts: int, one: Tensor, draw: torch.Generator) -> Tensor:
    """Logits of mean 0 and one width. The widest directions are left out: there a document's topic decides."""
    mean, hidden = flat.mean(dim=0), flat.shape[1]
    centred = flat - mean
    sizes, directions = torch.linalg.eigh(centred.T @ centred / len(flat))
    taken = slice(hidden // 2, max(hidden // 2 + n_experts, hidden - hidden // 16))  # sizes grow
    if directions[:, taken].shape[1] < n_experts:  # a model as narrow as it has experts
        taken = slice(0, hidden)
    angles = torch.randn(n_experts, directions[:, taken].shape[1], generator=draw)
    if n_experts > 1:
        angles = angles - angles.mean(dim=0)
    if n_experts <= angles.shape[1]:
        angles = torch.linalg.qr(angles.T)[0].T
    weight = angles / sizes[taken].clamp(min=1e-12).sqrt() @ directions[:, taken].T
    weight = weight / (centred @ weight.T).std().clamp(min=1e-12) * _LOGIT_WIDTH
    evened: Tensor = weight - (weight @ mean)[:, None] * one
    return evened


def _train(weight: Tensor, states: Tensor, top_k: int, n_steps: int, draw: torch.Generator) -> Tensor:
    scale = float(weight.std())
    matrix = weight.clone().requires_grad_()
    optimizer = torch.optim.Adam([matrix], lr=_LEARNING_RATE * scale)
    for step in range(n_steps):
        optimizer.param_groups[0]["lr"] = _LEARNING_RATE * scale * (1 - step / n_steps)
        chosen = states[torch.randint(len(states), (min(_DOCUMENTS_A_STEP, len(states)),), generator=draw)]
        logits = functional.linear(chosen, matrix)
        ids = logits.detach().topk(top_k, dim=-1).indices
        uneven = [load_balancing_loss(*of_document) for of_document in zip(logits, ids, strict=True)]
        loss = torch.stack(uneven).mean() + load_balancing_loss(logits, ids)
        probabilities = logits.softmax(dim=-1)
        entropy = -(probabilities * logits.log_softmax(dim=-1)).sum(dim=-1).mean()
        loss = loss + _ENTROPY_WEIGHT * entropy + _Z_WEIGHT * router_z_loss(logits)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return matrix.detach()


def _even_out(weight: Tensor, flat: Tensor, one: Tensor, top_k: int) -> Tensor:
    """A bias for each expert, up where it has less than its part, folded into the matrix along `one`."""
    n_experts = len(weight)
    logits, along = flat @ weight.T, (flat @ one)[:, None]
    bias = torch.zeros(n_experts)
    rate = _BIAS_RATE * float(logits.std())
    for step in range(_BIAS_STEPS):
        counts = expert_counts((logits + along * bias).topk(top_k, dim=-1).indices, n_experts)
        bias += rate * (1 - step / _BIAS_STEPS) * (1 - counts / counts.mean())
    return weight + bias[:, None] * one
