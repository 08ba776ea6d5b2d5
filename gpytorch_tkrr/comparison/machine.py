"""What a reader must know to judge a measurement: the machine, the versions, the memory of this process."""

from __future__ import annotations

import os
import platform
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def machine_facts() -> dict[str, Any]:
    """Processor, cores, threads, versions, date."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in ("torch", "gpytorch", "linear_operator", "numpy")},
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def peak_resident_bytes() -> int | None:
    """The largest resident memory of this process so far; None where the system does not say."""
    try:
        # Linux hands ru_maxrss down from the parent process, so the high-water mark of this one is read instead.
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    except (OSError, IndexError):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
