"""Arithmetic in the dtype that was asked for, whatever the caller's autocast says."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def exact(function: Callable) -> Callable:
    """`function(out, ...)` with autocast off on out's device: autocast would run the products in 16 bits."""

    @functools.wraps(function)
    def call(out, *args, **kwargs):
        with torch.autocast(out.device.type, enabled=False):
            return function(out, *args, **kwargs)

    return call
