"""How fast the hardware could be: the denominator of MFU."""

from __future__ import annotations

import re
import time

import torch

from trainer.precision import param_dtype

# Dense bf16 and fp16 matmul peaks in FLOP/s from the vendors' data sheets, by a part of the device's name.
_GPU_PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
_SECONDS = 0.3


def peak_flops(device: torch.device, precision: str) -> tuple[float, str]:
    """Matmul rate of one device in FLOP/s, and where the number is from.

    A known GPU in bf16 or fp16 counts by its data sheet. Everything else is measured: the fastest of repeated square
    matmuls.
    """
    if device.type == "cuda" and precision in ("bf16", "fp16"):
        name = torch.cuda.get_device_name(device)
        for part, peak in _GPU_PEAKS.items():
            if re.search(rf"\b{part}\b", name):
                return peak, f"data sheet of {name}"
    return _measure(device, param_dtype(precision)), "measured matmul rate"


def _measure(device: torch.device, dtype: torch.dtype) -> float:
    # Small enough to be quick where half precision is emulated on a CPU, large enough to be bound by arithmetic.
    n = 8192 if device.type == "cuda" else 768 if dtype == torch.float32 else 256
    a = torch.ones(n, n, device=device, dtype=dtype)
    best, begin = 0.0, time.perf_counter()
    while time.perf_counter() - begin < _SECONDS or best == 0.0:
        start = time.perf_counter()
        torch.matmul(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2 * n**3 / (time.perf_counter() - start))
    return best
