"""The private part of the interface between an algorithm and a model's engine.

A user's algorithm overrides the public hooks of ``AlgorithmImpl`` and keeps the default policy. The built-in algorithms
also declare what is exchanged, in which steps, and what the engine must check.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..model_engine.algorithm_interface import Exchange, WrappedModel
from ..process_group import ReduceOp


def _nothing(*_: Any) -> None:
    """Does nothing."""


def _every_step(step: int) -> bool:
    return True


def _read(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    return read()


@dataclass(frozen=True, kw_only=True)
class TrainingCallbacks:
    """Functions that the engine calls around forwards, backwards and optimizer steps."""

    #: Called immediately before each forward, in training and evaluation. The argument is True in training mode with
    #: gradients enabled.
    before_forward: Callable[[bool], None] = _nothing
    #: Called after each forward with the model's output, or with None if the forward raised.
    after_forward: Callable[[Any], None] = _nothing
    #: Called at the first gradient of each backward, also inside ``no_sync``.
    before_backward: Callable[[], None] = _nothing
    #: Called after each backward for which :attr:`before_backward` was called, also if the backward raised.
    after_backward: Callable[[], None] = _nothing
    #: Called before each step of every optimizer that holds parameters of the model, including optimizers that
    #: ``with_bagua`` was not given.
    before_optimizer_step: Callable[[torch.optim.Optimizer], None] = _nothing
    #: Called after each step of such an optimizer. If the step raised, called when the exception is freed.
    after_optimizer_step: Callable[[], None] = _nothing


@dataclass(frozen=True, kw_only=True)
class ExchangePolicy:
    """The properties of an algorithm that a model's engine must know in addition to the public hooks.

    ``AlgorithmImpl._policy`` returns one. Its fields may be methods of the algorithm. Only the engine keeps the policy:
    if the algorithm did too, the reference cycle would delay the end of a dropped model.
    """

    #: Makes the object that decides which tensors are exchanged, before each ``init_tensors``. None: gradients.
    make_exchange: Callable[[WrappedModel], Exchange] | None = None
    #: How sparse gradients are combined: SUM or AVG. None refuses models with sparse gradients.
    sparse_op: ReduceOp | None = None
    #: Returns True if step t, counted from 0, communicates. Every bucket must be communicated in such a step; otherwise
    #: the engine raises BaguaError.
    communicates: Callable[[int], bool] = _every_step
    #: True if rank 0 broadcasts the model's buffers in steps that communicate. Buffers are sent after the backward if
    #: gradients are exchanged, and before the first forward otherwise.
    sends_buffers: bool = True
    #: Returns the step number that ranks compare before they communicate, starting at 1; 0 turns the check off. Ranks
    #: that disagree raise MismatchError. None counts exchanges of weights. If gradients are exchanged, None counts
    #: optimizer steps that had no backward before them.
    compared_step: Callable[[], int] | None = None
    #: Raises an error if the algorithm cannot train this model. Called before any communication. If one rank raises,
    #: the other ranks raise MismatchError.
    check_model: Callable[[WrappedModel], None] = _nothing
    #: Functions to call around forwards, backwards and optimizer steps. None saves the hooks after each of them.
    callbacks: TrainingCallbacks | None = None
    #: Releases resources, such as threads, when the model is wrapped again or unwrapped. May be called twice. Not
    #: called when the process ends.
    close: Callable[[], None] = _nothing
    #: Calls its argument, which reads a state dict, and returns that or, if threads change weights, a copy.
    read_state: Callable[[Callable[[], dict[str, Any]]], dict[str, Any]] = _read
    #: Returns a context manager inside which no thread of the algorithm changes this rank's weights. Not collective.
    pause: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    #: True if a process may rejoin a running elastic job that uses this algorithm.
    can_rejoin: bool = False
    #: True if state is derived from the weights. Loading weights without that state then raises BaguaError.
    has_weight_state: bool = False
    #: True if assigning weights between ``with_bagua`` and the first step raises BaguaError as well.
    fixes_initial_weights: bool = False
    #: True if each bucket is padded to a multiple of the number of ranks in the group.
    pads_buckets: bool = False
    #: True if the ranks may use votes and divide by the sum of their weights, False if they may use votes and only add
    #: up, None if they may not use votes.
    votes_divide: bool | None = None
    #: Kinds of state that only the rank that saved them can load, and only in a group with the same members.
    rank_state: tuple[str, ...] = ("error",)
