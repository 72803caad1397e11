"""The GPUs that a contender uses, as NVML knows them; for the worker, so the standard library alone at the top."""

from __future__ import annotations

import os
from typing import Any


def used(device: str) -> tuple[Any, list[Any]]:
    """NVML and the handles of the GPUs that CUDA shows us: the first for `cuda`, all of them for `auto`.

    NVML itself does not care for CUDA_VISIBLE_DEVICES. Fails in many ways: not installed, not permitted, no driver.
    """
    import pynvml

    pynvml.nvmlInit()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    else:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID(name)
            for name in names
        ]
    return pynvml, handles if device == "auto" else handles[:1]
